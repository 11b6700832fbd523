"""Folders with links, devices and huge files: every command refuses them in one line, at once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import Capture, change_config, contents, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.compose import compose_config
from ml_pipeline.assembly.run import run as build_run
from ml_pipeline.assembly.run import train
from ml_pipeline.assembly.script import exit_code
from ml_pipeline.foreign import ForeignFileError, check_folder, read_regular

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no FIFOs and devices")

SETTINGS = [*small(), "~callbacks.evaluation", "~callbacks.media"]
RUN = "runs/CartPole-v1/foreign"


@pytest.fixture
def run(plain_run: Path, here: Path) -> Path:
    """A run that the tests make hostile, and a folder ``precious`` beside it."""
    shutil.copytree(plain_run, here / RUN)
    (here / "precious" / "checkpoints").mkdir(parents=True)
    (here / "precious" / "file").write_text("{}")
    return here / RUN


def resume(run: str, *more: str) -> int:
    words = [f"resume={run}", "total_steps=128", *more]
    return exit_code(lambda: build_run(compose_config(words), words))


COMMANDS: dict[str, Callable[[str], int]] = {
    "evaluate": lambda run: main(["evaluate", run, "--episodes", "1"]),
    "video": lambda run: main(["evaluate", run, "--episodes", "1", "--video"]),
    "export": lambda run: main(["export", run]),
    "play": lambda run: main(["play", run, "--episodes", "1"]),
    "compare": lambda run: main(["compare", run]),
    "paper": lambda run: main(["compare", run, "--paper", "figures"]),
    "tournament": lambda run: main(["tournament", run, run]),
    "judge": lambda run: main(["judge", run]),
    "replay": lambda run: main(["replay", run]),
    "init_from": lambda run: exit_code(lambda: train([*SETTINGS, f"init_from={run}"])),
    "resume": resume,
}

# Files and folders that a run has or may get.
FILES = [
    *("config.yaml", "summary.json", "metrics.csv", "changes.diff", "policy.pt2"),
    *("checkpoints/latest.pt", "checkpoints/best.pt", "checkpoints/0123456789abcdef.envs"),
    "replay/0-8-0123456789abcdef.rows",
]
FOLDERS = ["checkpoints", "replay", "videos", "tensorboard", "wandb"]


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is at most 107 bytes long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(Path("precious/file").absolute()),
    "dangling link": lambda path: path.symlink_to(Path("precious/new").absolute()),
    "relative link": lambda path: path.symlink_to("../" * 4 + "precious/file"),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "fifo": os.mkfifo,
    "socket": make_socket,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["link", "fifo"])  # a resume refuses the others, too
@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", "checkpoints/latest.pt"])
def test_special_file_is_refused_by_every_command(
    name: str, kind: str, command: str, run: Path, here: Path, capsys: Capture
) -> None:
    replace(run / name, SPECIAL[kind])
    before = contents(here / "precious")

    assert COMMANDS[command](RUN) == 1

    error = capsys.readouterr().err
    assert f"{RUN}/{name} is " in error
    assert "Traceback" not in error
    assert contents(here / "precious") == before


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_each_file_of_a_run_is_checked_before_a_resume(
    name: str, kind: str, run: Path, here: Path, capsys: Capture
) -> None:
    replace(run / name, SPECIAL[kind])
    before = contents(here / "precious")

    assert resume(RUN) == 1

    assert f"{RUN}/{name} is " in capsys.readouterr().err
    assert contents(here / "precious") == before


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_that_is_a_link_out_is_not_written_into(
    name: str, run: Path, here: Path, capsys: Capture
) -> None:
    replace(run / name, lambda path: path.symlink_to(here / "precious" / "checkpoints"))
    before = contents(here)

    for command in ("resume", "video", "export"):
        assert COMMANDS[command](RUN) == 1
        assert f"{RUN}/{name} is a link out of the folder" in capsys.readouterr().err
    assert contents(here) == before


def test_trust_accepts_links_and_a_linked_run_folder_needs_none(run: Path, here: Path) -> None:
    (here / "mine").symlink_to(run)
    assert main(["evaluate", "mine", "--episodes", "1"]) == 0
    shutil.move(run / "checkpoints", here / "elsewhere")
    (run / "checkpoints").symlink_to(here / "elsewhere")

    assert main(["evaluate", RUN, "--episodes", "1"]) == 1
    assert main(["evaluate", RUN, "--episodes", "1", "--trust"]) == 0
    assert resume(RUN, "trust=true") == 0


def test_links_of_wandb_and_inside_the_folder_are_accepted(run: Path, here: Path) -> None:
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "wandb" / "run-1" / "debug-core.log").symlink_to(here / "precious" / "file")
    (run / "policy.onnx").symlink_to("policy.pt2")

    assert main(["evaluate", RUN, "--episodes", "1"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_link_inside_the_folder_of_tensorboard_is_refused(
    command: str, run: Path, here: Path, capsys: Capture
) -> None:
    (run / "tensorboard").mkdir()
    SPECIAL["link"](run / "tensorboard" / "events.out.tfevents.1")
    before = contents(here / "precious")

    assert COMMANDS[command](RUN) == 1

    assert "tensorboard/events.out.tfevents.1 is a link out" in capsys.readouterr().err
    assert contents(here / "precious") == before


@pytest.mark.parametrize("command", ["evaluate", "compare", "export", "resume"])
def test_content_of_the_folder_of_wandb_is_neither_read_nor_changed(
    command: str, run: Path, here: Path
) -> None:
    (run / "wandb" / "latest-run").mkdir(parents=True)
    for kind, make in SPECIAL.items():
        make(run / "wandb" / kind.replace(" ", "-"))
        make(run / "wandb" / "latest-run" / kind.replace(" ", "-"))
    before = contents(here / "precious")

    assert COMMANDS[command](RUN) == 0

    assert contents(here / "precious") == before


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.csv", "latest.pt"])
def test_huge_file_is_refused_before_it_is_read(
    name: str, run: Path, here: Path, capsys: Capture
) -> None:
    path = run / "checkpoints" / name if name == "latest.pt" else run / name
    os.truncate(path, 2**43)  # sparse: it needs no space on the disk

    assert resume(RUN) == 1

    error = capsys.readouterr().err
    assert "has 8,796,093,022,208 bytes or more; at most" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", ["zero", "fifo", "link"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.csv"])
def test_list_of_runs_shows_a_hostile_folder(
    name: str, kind: str, run: Path, here: Path, capsys: Capture
) -> None:
    shutil.copytree(run, run.parent / "good")
    replace(run / name, SPECIAL[kind])

    assert main(["runs"]) == 0

    assert "good" in capsys.readouterr().out


def test_file_of_the_kernel_without_a_size_is_not_read_past_the_limit() -> None:
    with pytest.raises(ForeignFileError, match="at most 3 are read"):
        read_regular("/proc/self/status", most_bytes=3)


def test_deep_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / ("a/" * 60)).mkdir(parents=True)

    with pytest.raises(ForeignFileError, match="nested deeper than 50"):
        check_folder(tmp_path)


@pytest.fixture
def foreign(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The run, made by another user; without env snapshots, which need trust."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    for path in run.glob("checkpoints/*.envs"):
        path.unlink()
    return run


TENSORBOARD = {"_target_": "ml_pipeline.runs.local_loggers.TensorBoardLogger"}


@pytest.mark.parametrize(
    ("typed", "exists"),
    [([], False), (["trust=true"], True), (["logger=none"], False), (["logger=tensorboard"], True)],
    ids=str,
)
def test_resume_uses_the_loggers_of_another_user_only_with_trust(
    typed: list[str], exists: bool, foreign: Path, capsys: Capture
) -> None:
    if exists:
        pytest.importorskip("tensorboard", reason="needs the extra: pip install -e '.[look]'")
    change_config(foreign, "logger", {"theirs": TENSORBOARD})

    assert resume(RUN, *typed) == 0

    assert (foreign / "tensorboard").is_dir() == exists
    said = "another user chose its loggers, theirs; they are off; add logger=NAME"
    assert (said in capsys.readouterr().out) == (not typed)


def test_resume_takes_no_setting_of_a_foreign_logger_of_the_same_name(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {
        "_target_": "ml_pipeline.runs.loggers.WandbLogger",
        "mode": "online",
        "entity": "author",
    }
    change_config(foreign, "logger", {"wandb": theirs})

    assert resume(RUN, "logger.wandb.mode=disabled") == 0

    logger = yaml.safe_load((foreign / "config.yaml").read_text())["logger"]["wandb"]
    assert logger["mode"] == "disabled"
    assert logger["entity"] is None


@pytest.mark.parametrize("key", ["cache_dir", "video_folder", "dir"])
def test_env_of_another_user_names_no_folder_to_write_into(
    key: str, foreign: Path, here: Path, capsys: Capture
) -> None:
    env = yaml.safe_load((foreign / "config.yaml").read_text())["env"]
    change_config(foreign, "env", {**env, "kwargs": {"data": [{key: str(here / "precious")}]}})

    for command in ("evaluate", "resume", "play"):
        assert COMMANDS[command](RUN) == 1
        assert f"env.kwargs.data.0.{key}=" in capsys.readouterr().err
