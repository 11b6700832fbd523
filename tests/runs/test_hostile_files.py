"""Single files that someone else gave: a FIFO, a device or a huge file is refused at once.

Run folders are in test_hostile_folders.py, studies in tests/study/test_foreign_studies.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Capture, error_line

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.script import exit_code
from ml_pipeline.foreign import half_of_memory
from ml_pipeline.worlds.game_boy.emulator import read_rom
from ml_pipeline.worlds.game_boy.rules import Cartridge, read_rules
from ml_pipeline.worlds.trading.data.files import market_files
from ml_pipeline.worlds.trading.paper_log import PaperLog

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no FIFOs and devices")


def write_huge(path: Path) -> None:
    """A file with holes, which takes no room on the disk."""
    path.touch()
    os.truncate(path, half_of_memory() + 1)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "huge": write_huge,
}


CARTRIDGE = Cartridge("", False, 0)


def paper_log(folder: str) -> None:
    with PaperLog.opened(Path(folder), {}):
        pass


# What reads the file -> its name, and the call.
READERS: dict[str, tuple[str, Callable[[], int]]] = {
    "play": ("policy.onnx", lambda: main(["play", "policy.onnx"])),
    "play pt2": ("policy.pt2", lambda: main(["play", "policy.pt2", "--trust"])),
    "serve": ("policy.onnx", lambda: main(["serve", "policy.onnx"])),
    "tournament": ("policy.onnx", lambda: main(["tournament", "policy.onnx", "random"])),
    "paper": ("policy.pt2", lambda: main(["paper", "policy.pt2", "--data", "bars.csv"])),
    "paper log": ("log/paper.jsonl", lambda: exit_code(lambda: paper_log("log"))),
    "data": ("bars.csv", lambda: main(["data", "bars.csv"])),
    "data parquet": ("bars.parquet", lambda: main(["data", "bars.parquet"])),
    "market": ("bars.csv", lambda: exit_code(lambda: market_files("bars.csv"))),
    "sweep": ("sweep/job_0.json", lambda: main(["compare", "sweep"])),
    "rom": ("game.gb", lambda: exit_code(lambda: read_rom(Path("game.gb")))),
    "game": ("game.yaml", lambda: exit_code(lambda: read_rules(Path("game.yaml"), CARTRIDGE))),
    "runs": ("runs/A/b/config.yaml", lambda: main(["compare", "runs/A/b"])),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_special_or_huge_file_is_refused_in_one_line(
    reader: str, kind: str, here: Path, capsys: Capture
) -> None:
    name, read = READERS[reader]
    if (reader, kind) == ("paper log", "huge"):
        pytest.skip("only the end of a log is read, so it may be of any size")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](Path(name))

    assert read() == 1

    error = capsys.readouterr().err
    assert name in error.splitlines()[0]
    assert "Traceback" not in error


JOBS: dict[str, object] = {
    "list": [],
    "number": 5,
    "no fields": {},
    "unknown field": {"colour": "red"},
    "text for a number": {"number": "x", "overrides": [], "status": "failed", "pid": 1},
    "number for overrides": {"number": 1, "overrides": 5, "status": "failed", "pid": 1},
    "list in overrides": {"number": 1, "overrides": [[]], "status": "failed", "pid": 1},
    "number for a folder": {
        "number": 1,
        "overrides": [],
        "status": "failed",
        "pid": 1,
        "run_dir": 5,
    },
}


@pytest.mark.parametrize("name", [*JOBS, "word", "deep", "binary"])
def test_damaged_note_of_a_job_is_one_line(name: str, here: Path, capsys: Capture) -> None:
    texts = {"word": b"hello", "deep": b"[" * 100_000, "binary": bytes(range(256))}
    Path("sweep").mkdir()
    text = texts[name] if name in texts else json.dumps(JOBS[name]).encode()
    Path("sweep/job_0.json").write_bytes(text)

    assert main(["compare", "sweep"]) == 1

    assert error_line(capsys).startswith("sweep/job_0.json is not the note of a job: ")
