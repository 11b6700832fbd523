"""GameRules: a game as data, read from a YAML file and checked against its ROM.

The file names addresses of the memory, and says what is rewarded and when an episode ends. Every
mistake is refused with the file and its line. docs/game_boy.md describes the keys.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, NoReturn

import yaml

from ml_pipeline.errors import UserError
from ml_pipeline.foreign import read_regular
from ml_pipeline.worlds.game_boy.expressions import (
    DELTA,
    Bounds,
    Evaluate,
    ExpressionError,
    condition,
    number,
)

BUTTONS = ("a", "b", "start", "select", "up", "down", "left", "right")
NO_BUTTON = "none"
DEFAULT_ACTIONS = (NO_BUTTON, *BUTTONS)
_TYPES = "u8, i8, bcd8, or u, i, bcd with 16, 24, 32 and le or be: u16le, bcd24be"
_KEYS = ("title", "actions", "addresses", "reward", "end")
_ADDRESS_KEYS = ("address", "bank", "type", "bounds")


class GameFileError(UserError):
    """The file of a game has a mistake."""


Place = int | tuple[int, int]  # an index of PyBoy's memory, with its bank if it has several


class Address(NamedTuple):
    """Where a number is, and how its bytes are read."""

    places: tuple[Place, ...]  # the most significant byte first
    read: Callable[[Sequence[int]], int]  # the value of these bytes
    bounds: Bounds


class Cartridge(NamedTuple):
    """The facts of a ROM that a game file depends on."""

    title: str
    is_color: bool
    n_ram_banks: int


class GameRules(NamedTuple):
    """A checked game file."""

    actions: tuple[tuple[str, ...], ...]  # the buttons of each action
    addresses: Mapping[str, Address]
    reward: Mapping[str, Evaluate]
    end: Mapping[str, Evaluate]


def read_rules(path: Path, cartridge: Cartridge) -> GameRules:
    """Read and check the file of a game for this cartridge."""
    reader = _Reader(path)
    keys = reader.mapping(reader.root(), "the file", known=_KEYS, needed=("addresses", "reward"))
    if "title" in keys:
        title = reader.text(keys["title"], "title")
        if title != cartridge.title:
            fix = f"use the ROM of {title!r}, or correct the title"
            reader.fail(keys["title"], f"the title of the ROM is {cartridge.title!r}; {fix}")
    names = _read_actions(reader, keys.get("actions"))
    nodes = reader.mapping(keys["addresses"], "addresses")
    addresses = {name: _read_address(reader, name, nodes[name], cartridge) for name in nodes}
    bounds = {name: address.bounds for name, address in addresses.items()}
    return GameRules(
        tuple(() if name == NO_BUTTON else tuple(name.split("+")) for name in names),
        addresses,
        _read_expressions(reader, keys.get("reward"), "reward", number, bounds),
        _read_expressions(reader, keys.get("end"), "end", condition, bounds),
    )


def _read_actions(reader: _Reader, node: yaml.Node | None) -> tuple[str, ...]:
    if node is None:
        return DEFAULT_ACTIONS
    names: list[str] = []
    for each in reader.sequence(node, "actions"):
        name = reader.text(each, "an action")
        for button in [] if name == NO_BUTTON else name.split("+"):
            if button not in BUTTONS:
                known = f"use {', '.join(BUTTONS)}, {NO_BUTTON}, or several as a+up"
                reader.fail(each, f"actions: {button!r} is not a button; {known}")
        if name in names:
            reader.fail(each, f"actions: {name} is there twice; remove one")
        names.append(name)
    if len(names) < 2:
        reader.fail(node, f"actions: {len(names)} action leaves no choice; give at least 2")
    return tuple(names)


def _read_expressions(
    reader: _Reader,
    node: yaml.Node | None,
    key: str,
    parse: Callable[[str, Mapping[str, Bounds]], Evaluate],
    names: Mapping[str, Bounds],
) -> dict[str, Evaluate]:
    found: dict[str, Evaluate] = {}
    for name, each in (reader.mapping(node, key) if node is not None else {}).items():
        text = " ".join(reader.text(each, f"{key}.{name}").split())
        try:
            found[name] = parse(text, names)
        except ExpressionError as error:
            reader.fail(each, f"{key}.{name}: {error}")
    return found


def _read_address(reader: _Reader, name: str, node: yaml.Node, cartridge: Cartridge) -> Address:
    key = f"addresses.{name}"
    if not name.isidentifier() or keyword.iskeyword(name) or name == DELTA:
        reader.fail(node, f"{key}: a name has letters, digits and _, and is not a word of Python")
    keys = reader.mapping(node, key, known=_ADDRESS_KEYS, needed=("address",))
    start = reader.integer(keys["address"], f"{key}.address")
    kind, n_bytes, order = _read_type(reader, keys.get("type"), f"{key}.type")
    bank = reader.integer(keys["bank"], f"{key}.bank") if "bank" in keys else None
    _check_place(reader, keys, key, start, n_bytes, bank, cartridge)
    places = [each if bank is None else (bank, each) for each in range(start, start + n_bytes)]
    if order == "le":
        places.reverse()
    low, high = _bounds_of(kind, n_bytes)
    if "bounds" in keys:
        parts = reader.sequence(keys["bounds"], f"{key}.bounds")
        given = [reader.integer(each, f"{key}.bounds") for each in parts]
        if len(given) != 2 or not low <= given[0] < given[1] <= high:
            rule = f"must be [LOW, HIGH], within {low} and {high}"
            reader.fail(keys["bounds"], f"{key}.bounds={given}: {rule}")
        low, high = given
    return Address(tuple(places), _READERS[kind], Bounds(low, high))


def _read_type(reader: _Reader, node: yaml.Node | None, key: str) -> tuple[str, int, str]:
    """The kind of number, its bytes, and their order."""
    text = reader.text(node, key) if node is not None else "u8"
    found = re.fullmatch(r"(u|i|bcd)(?:(8)|(16|24|32)(le|be))", text)
    if found is None:
        assert node is not None
        reader.fail(node, f"{key}={text}: unknown type; use {_TYPES}")
    kind, _, bits, order = found.groups()
    return kind, int(bits or 8) // 8, order or "be"


def _bounds_of(kind: str, n_bytes: int) -> tuple[int, int]:
    if kind == "bcd":
        return 0, 100**n_bytes - 1
    n_values: int = 256**n_bytes
    return (0, n_values - 1) if kind == "u" else (-n_values // 2, n_values // 2 - 1)


# First address, last address, its name, and the banks that a cartridge has there.
_Region = tuple[int, int, str, Callable[[Cartridge], Sequence[int]]]
_REGIONS: tuple[_Region, ...] = (
    (0x8000, 0x9FFF, "video RAM", lambda cartridge: range(2) if cartridge.is_color else ()),
    (0xA000, 0xBFFF, "RAM of the cartridge", lambda cartridge: range(cartridge.n_ram_banks)),
    (0xC000, 0xCFFF, "work RAM", lambda cartridge: ()),
    (0xD000, 0xDFFF, "work RAM", lambda cartridge: range(1, 8) if cartridge.is_color else ()),
    (0xFE00, 0xFE9F, "sprite table", lambda cartridge: ()),
    (0xFF80, 0xFFFE, "high RAM", lambda cartridge: ()),
)


def _check_place(
    reader: _Reader,
    keys: Mapping[str, yaml.Node],
    key: str,
    start: int,
    n_bytes: int,
    bank: int | None,
    cartridge: Cartridge,
) -> None:
    """Refuse memory that does not change, registers, and banks that the cartridge does not have."""
    where = keys["address"]
    last = start + n_bytes - 1
    found = [each for each in _REGIONS if each[0] <= start and last <= each[1]]
    # Without banks, the work RAM is one piece.
    if start >= 0xC000 and last <= 0xDFFF and not found:
        found = [_REGIONS[2]]
    if not found:
        regions = ", ".join(f"{low:#06x}-{high:#06x} ({name})" for low, high, name, _ in _REGIONS)
        reader.fail(where, f"{key}.address={start:#06x}: not readable RAM; use {regions}")
    _, _, name, banks_of = found[0]
    banks = banks_of(cartridge)
    is_cartridge_ram = name == "RAM of the cartridge"
    if is_cartridge_ram and not banks:
        reader.fail(where, f"{key}.address={start:#06x}: this cartridge has no RAM of its own")
    if is_cartridge_ram and bank is None:
        reader.fail(where, f"{key}: RAM of the cartridge needs bank, one of 0 to {max(banks)}")
    if bank is not None and bank not in banks:
        have = f"it has {min(banks)} to {max(banks)}" if banks else "remove bank"
        reader.fail(keys["bank"], f"{key}.bank={bank}: no such bank of the {name}; {have}")


def _unsigned(data: Sequence[int]) -> int:
    return int.from_bytes(data, "big")


def _signed(data: Sequence[int]) -> int:
    return int.from_bytes(data, "big", signed=True)


def _decimal(data: Sequence[int]) -> int:
    value = 0
    for byte in data:
        value = 100 * value + 10 * (byte >> 4) + (byte & 15)
    return value


_READERS = {"u": _unsigned, "i": _signed, "bcd": _decimal}


_GAME_BYTES = 1_000_000


class _Reader:
    """Reads YAML nodes; an error names the file and the line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def root(self) -> yaml.Node:
        try:
            text = read_regular(self._path, most_bytes=_GAME_BYTES).decode("utf-8")
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except OSError as error:
            raise GameFileError(f"game={self._path}: {error.strerror or error}") from error
        except RecursionError as error:
            raise GameFileError(f"game={self._path}: is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise GameFileError(f"game={self._path}: is not a text file in UTF-8") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            reason = getattr(error, "problem", None) or "it is not YAML"
            raise GameFileError(f"{self._path}{line}: {reason}") from error
        if node is None:
            raise GameFileError(f"game={self._path}: is empty; docs/game_boy.md has a template")
        return node

    def fail(self, node: yaml.Node, message: str) -> NoReturn:
        raise GameFileError(f"{self._path}:{node.start_mark.line + 1}: {message}")

    def mapping(
        self,
        node: yaml.Node,
        key: str,
        *,
        known: Sequence[str] | None = None,
        needed: Sequence[str] = (),
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{key}: must be keys and values, NAME: VALUE")
        found: dict[str, yaml.Node] = {}
        for name_node, value in node.value:
            name = self.text(name_node, f"a key of {key}")
            if name in found:
                self.fail(name_node, f"{key}: {name} is there twice; remove one")
            if known is not None and name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
                self.fail(name_node, f"{key}: unknown key {name}; {fix}")
            found[name] = value
        for name in needed:
            if name not in found:
                self.fail(node, f"{key}: {name} is missing")
        return found

    def sequence(self, node: yaml.Node, key: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, f"{key}: must be a list, [A, B]")
        return list(node.value)

    def text(self, node: yaml.Node, key: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, f"{key}: must be one value")
        return str(node.value)

    def integer(self, node: yaml.Node, key: str) -> int:
        text = self.text(node, key)
        try:
            return int(text, 0)
        except ValueError:
            self.fail(node, f"{key}={text}: must be an integer, such as 0xC000")
