"""Files of GameBoy: ROMs, save states and game files with mistakes are refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from game_boy_roms import GAME_FILES, ROM_SIZE, write_game

from ml_pipeline.assembly.run import train
from ml_pipeline.envs.factory import EnvError
from ml_pipeline.worlds.game_boy.emulator import RomError, read_rom
from ml_pipeline.worlds.game_boy.env import GameBoy
from ml_pipeline.worlds.game_boy.expressions import Bounds
from ml_pipeline.worlds.game_boy.rules import Cartridge, GameFileError, read_rules

PLAIN = Cartridge("CATCH", is_color=False, n_ram_banks=0)
COLOR = Cartridge("CATCH", is_color=True, n_ram_banks=4)


def rules(folder: Path, text: str, cartridge: Cartridge = PLAIN) -> Any:
    path = folder / "game.yaml"
    path.write_text(text)
    return read_rules(path, cartridge)


def with_address(entry: str) -> str:
    return f"addresses:\n  score: {entry}\nreward: {{score: delta.score}}\n"


def damaged(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + bytes([value]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is not a Game Boy ROM"),
        (lambda data: b"PNG" * 9999, "is not a Game Boy ROM"),
        (lambda data: damaged(data, 0x134, 0xFF), "is not a Game Boy ROM"),
        (lambda data: data[:0x140], "is not a Game Boy ROM"),
        (lambda data: data[: ROM_SIZE // 2], "declares 32,768 bytes, but the file has 16,384"),
        (lambda data: data[:20_000], "declares 32,768 bytes, but the file has 20,000; the file is"),
        (lambda data: data + b"more", "but the file has 32,772"),
    ],
)
def test_a_file_that_is_not_a_whole_rom_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    arguments = write_game(tmp_path, "catch")
    rom = Path(arguments["rom"])
    rom.write_bytes(change(rom.read_bytes()))

    with pytest.raises(RomError, match=rf"^rom={re.escape(str(rom))}: .*{message}"):
        GameBoy(**arguments)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    arguments = write_game(tmp_path, "catch")

    for key in ("rom", "game", "state"):
        with pytest.raises((RomError, GameFileError), match=f"{key}=nowhere: No such file"):
            GameBoy(**{**arguments, key: "nowhere"})


def test_a_cartridge_that_pyboy_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RomError, match=r"PyBoy cannot run this ROM: .*type"):
        GameBoy(**write_game(tmp_path, "catch", kind=0x77))


def test_the_header_gives_title_colour_and_ram(tmp_path: Path) -> None:
    arguments = write_game(tmp_path, "catch", kind=0x10, ram=3, color=True)

    rom = read_rom(Path(arguments["rom"]))

    assert rom.cartridge == COLOR
    assert rom.has_clock


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be loaded"),
        (b"\xff" * 99, "cannot be loaded: Cannot load state from a newer version"),
        (None, "has 1,000 bytes, but a state of this ROM has 1"),
    ],
)
def test_a_damaged_save_state_is_refused(tmp_path: Path, data: bytes | None, message: str) -> None:
    arguments = write_game(tmp_path, "catch")
    path = tmp_path / "some.state"
    with path.open("wb") as file:
        GameBoy(**arguments)._emulator.pyboy.save_state(file)
    path.write_bytes(path.read_bytes()[:1000] if data is None else data)

    with pytest.raises(RomError, match=f"^state={re.escape(str(path))}: {message}.*docs/game_boy"):
        GameBoy(**arguments, state=str(path))


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        ("u8", [0xFE], 254),
        ("i8", [0xFE], -2),
        ("u16le", [0x34, 0x12], 0x1234),
        ("u16be", [0x12, 0x34], 0x1234),
        ("i16le", [0xFE, 0xFF], -2),
        ("u24be", [1, 2, 3], 0x010203),
        ("u32le", [4, 3, 2, 1], 0x01020304),
        ("bcd8", [0x42], 42),
        ("bcd24be", [0x12, 0x34, 0x56], 123456),
        ("bcd16le", [0x34, 0x12], 1234),
    ],
)
def test_types_read_their_bytes(tmp_path: Path, kind: str, data: list[int], value: int) -> None:
    address = rules(tmp_path, with_address(f"{{address: 0xC010, type: {kind}}}")).addresses["score"]
    memory = dict(enumerate(data, start=0xC010))

    assert address.read([memory[place] for place in address.places]) == value
    assert address.bounds.low <= value <= address.bounds.high


def test_a_value_outside_its_bounds_is_clipped(tmp_path: Path) -> None:
    arguments = write_game(tmp_path, "catch")
    game = Path(arguments["game"])
    game.write_text(game.read_text().replace("0xC005, bounds: [0, 3]", "0xC005, bounds: [0, 2]"))
    env = GameBoy(**arguments)

    env.reset()

    assert env.rules.addresses["lives"].bounds == Bounds(0, 2)
    assert env._values == [0, 5, 0, 2]


def test_banks_are_those_of_the_cartridge(tmp_path: Path) -> None:
    found = rules(tmp_path, with_address("{address: 0xA010, bank: 3}"), COLOR)
    assert found.addresses["score"].places == ((3, 0xA010),)
    found = rules(tmp_path, with_address("{address: 0xDFFF, bank: 7}"), COLOR)
    assert found.addresses["score"].places == ((7, 0xDFFF),)
    found = rules(tmp_path, with_address("{address: 0xCFFF, type: u16le}"))
    assert found.addresses["score"].places == (0xD000, 0xCFFF)


@pytest.mark.parametrize(
    ("entry", "cartridge", "message"),
    [
        ("{address: 0x0150}", PLAIN, "not readable RAM; use 0x8000-0x9fff"),
        ("{address: 0xE000}", PLAIN, "not readable RAM"),
        ("{address: 0xFF04}", PLAIN, "not readable RAM"),
        ("{address: 0xFFFE, type: u16le}", PLAIN, "not readable RAM"),
        ("{address: 99999}", PLAIN, "not readable RAM"),
        ("{address: C000}", PLAIN, "address=C000: must be an integer, such as 0xC000"),
        ("{bank: 1}", PLAIN, "address is missing"),
        ("{address: 0xA000}", PLAIN, "this cartridge has no RAM of its own"),
        ("{address: 0xA000}", COLOR, "needs bank, one of 0 to 3"),
        ("{address: 0xA000, bank: 4}", COLOR, "bank=4: no such bank of the RAM of the cartridge"),
        (
            "{address: 0xD000, bank: 0}",
            COLOR,
            "bank=0: no such bank of the work RAM; it has 1",
        ),
        ("{address: 0xD000, bank: 1}", PLAIN, "bank=1: no such bank of the work RAM; remove bank"),
        ("{address: 0xC000, bank: x}", PLAIN, "bank=x: must be an integer"),
        ("{address: 0xC000, type: u16}", PLAIN, "type=u16: unknown type; use u8, i8, bcd8, or"),
        ("{address: 0xC000, type: [u8]}", PLAIN, "type: must be one value"),
        ("{address: 0xC000, bounds: [9, 3]}", PLAIN, r"bounds=\[9, 3\]: must be \[LOW, HIGH\]"),
        ("{address: 0xC000, bounds: [0, 256]}", PLAIN, "within 0 and 255"),
        ("{address: 0xC000, bounds: 9}", PLAIN, r"bounds: must be a list"),
        ("{address: 0xC000, size: 2}", PLAIN, "unknown key size; use address, bank"),
        ("{adress: 0xC000}", PLAIN, "unknown key adress; did you mean address"),
        ("0xC000", PLAIN, "must be keys and values"),
    ],
)
def test_a_wrong_address_is_refused_with_its_line(
    tmp_path: Path, entry: str, cartridge: Cartridge, message: str
) -> None:
    with pytest.raises(GameFileError, match=rf"game\.yaml:2: addresses\.score.*{message}"):
        rules(tmp_path, with_address(entry), cartridge)


GOOD = GAME_FILES["catch"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("CATCH", "TETRIS", r":1: the title of the ROM is 'CATCH'; use the ROM of 'TETRIS'"),
        ("none, left", "none, lift", r":2: actions: 'lift' is not a button; use a, b, start"),
        ("none, left", "left, left", r":2: actions: left is there twice"),
        ("[none, left, right, a]", "[a]", r":2: actions: 1 action leaves no choice"),
        ("[none, left, right, a]", "a", r":2: actions: must be a list"),
        ("  target:", "  cursor:", r":5: addresses: cursor is there twice"),
        ("  target:", "  delta:", r":5: addresses\.delta: a name has letters"),
        ("  target:", "  my-target:", r":5: addresses\.my-target: a name has letters"),
        ("delta.score", "delta.scor", r":9: reward\.score: `delta.scor` is unknown; did you mean"),
        ("delta.score", "score >", r":9: reward\.score: `score >` is not an expression"),
        ("delta.score", "score > 1", r":9: reward\.score: .* is a condition, not a number"),
        ("delta.score", "[1]", r":9: reward\.score: must be one value"),
        ("lives == 0", "lives", r":12: end\.over: `lives` is a number, not a condition"),
        ("lives == 0", "1 / lives > 2", r":12: end\.over: `1 / lives` can divide by zero"),
        ("end:", "ends:", r":11: the file: unknown key ends; did you mean end\?"),
        ("reward:", "rewards:", r":8: the file: unknown key rewards; did you mean reward\?"),
        ("addresses:", "addresses: {", r":\d+: "),
        ("title: CATCH", "- title", r":\d+: "),
    ],
)
def test_a_mistake_in_a_game_file_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD

    with pytest.raises(GameFileError, match=rf"game\.yaml{message}"):
        rules(tmp_path, GOOD.replace(old, new, 1))


def test_files_that_are_empty_or_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GameFileError, match=r"is empty; docs/game_boy\.md has a template"):
        rules(tmp_path, "# nothing\n")
    with pytest.raises(GameFileError, match="reward is missing"):
        rules(tmp_path, "addresses: {a: {address: 0xC000}}\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(GameFileError, match="is not a text file in UTF-8"):
        read_rules(tmp_path / "binary.yaml", PLAIN)


def test_the_defaults_are_all_buttons_and_no_end(tmp_path: Path) -> None:
    found = rules(tmp_path, "addresses: {x: {address: 0xC000}}\nreward: {x: 0.5 * delta.x}\n")

    assert found.actions[0] == ()
    assert len(found.actions) == 9
    assert found.end == {}


def test_two_buttons_can_be_one_action(tmp_path: Path) -> None:
    found = rules(tmp_path, GOOD.replace("none, left", "a+right, left"))

    assert found.actions[0] == ("a", "right")


def test_a_mistake_is_refused_before_a_run_folder_exists(here: Path) -> None:
    arguments = write_game(here, "catch")
    Path(arguments["game"]).write_text(GOOD.replace("delta.score", "delta.scor"))
    overrides = [f"env.kwargs.{key}={value}" for key, value in arguments.items()]

    with pytest.raises(EnvError, match=r"catch\.yaml:9: reward\.score: `delta\.scor` is unknown"):
        train(["env=game_boy", *overrides, "logger=none", "device=cpu"])
    with pytest.raises(EnvError, match=r"env\.kwargs\.rom=None: must be the path of a ROM"):
        train(["env=game_boy", "logger=none", "device=cpu"])

    assert not (here / "runs").exists()


def test_the_files_of_the_docs_are_accepted(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "game_boy.md").read_text()
    template, example = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)

    found = rules(tmp_path, template, Cartridge("MY GAME", is_color=False, n_ram_banks=2))

    assert list(found.reward) == ["score", "life", "level"]
    assert example == GAME_FILES["catch"]
