"""A changed byte in any file of a run that a command reads is reported, or changes nothing."""

from __future__ import annotations

import hmac
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import Capture, only_run, small
from stopped_runs import checkpoint_numbers

from ml_pipeline.__main__ import main
from ml_pipeline.analysis.run_data import read_run
from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.assembly.run import train
from ml_pipeline.assembly.script import exit_code
from ml_pipeline.runs import signatures
from ml_pipeline.runs.env_snapshots import (
    SnapshotError,
    load_snapshots,
    save_snapshots,
    snapshot_path,
)
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

# No command reads them.
UNREAD = ("changes.diff", "user_changes.diff")
SIGNED = (".yaml", ".onnx", ".pt2", ".envs")  # trust changes how these are read
REPLAY = [
    *("agent=dqn", "agent.buffer_size=60", "agent.learning_starts=16", "agent.batch_size=4"),
    *("agent.iteration_length=8", "network.hidden_sizes=[8]", "callbacks.evaluation.n_episodes=2"),
    *("n_envs=2", "vec_env=serial", "device=cpu", "logger=none", "total_steps=64"),
    *("callbacks.checkpoints.every_steps=32", "callbacks.checkpoints.final_episodes=2"),
]
RUNS = {"ppo": small(), "dqn": REPLAY}


@pytest.fixture(autouse=True)
def _every_line() -> None:
    """Lines that other tests have caused are printed again."""
    signatures.warn_once.cache_clear()


def change_digit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("command", ["evaluate", "compare", "runs"])
def test_changed_digit_of_a_config_is_reported(
    command: str, finished_run: Path, capsys: Capture
) -> None:
    change_digit(finished_run / "config.yaml", "gamma: 0.99", "gamma: 0.98")

    assert main([command, *([] if command == "runs" else [str(finished_run)])]) == 0

    changed = (
        f"{finished_run.name}/config.yaml: changed since it was written; if you did not edit it"
    )
    assert capsys.readouterr().err.count(changed) == 1


def test_changed_digit_of_a_summary_is_refused_with_the_way_out(
    finished_run: Path, capsys: Capture
) -> None:
    run = RunFolder(finished_run)
    change_digit(run.summary, '"env_steps": 64', '"env_steps": 65')

    with pytest.raises(RunFolderError, match=r"summary\.json is damaged: its checksum does not"):
        train([f"resume={finished_run}", "total_steps=96"])
    assert main(["runs"]) == 0
    assert "summary.json is damaged: its checksum does not match" in capsys.readouterr().err
    run.summary.unlink()
    assert train([f"resume={finished_run}", "total_steps=96"]).env_steps == 96


def test_status_that_is_replaced_in_place_keeps_the_checksum_right(finished_run: Path) -> None:
    run = RunFolder(finished_run)
    run.update_summary({"status": "running"})

    run.end_in_place("failed")

    assert run.read_summary()["status"] == "failed"


def test_summary_of_an_older_version_is_read_and_changed_in_place(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.summary.write_text('{"status": "running", "env": "CartPole-v1"}')

    run.end_in_place("failed")

    assert run.read_summary() == {"status": "failed", "env": "CartPole-v1"}


@pytest.fixture
def made(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.make()
    return run


def test_changed_byte_of_trusted_envs_is_found(made: RunFolder) -> None:
    token = save_snapshots(made, [b"one", b"two"])
    path = snapshot_path(made, token)
    path.write_bytes(path.read_bytes().replace(b"two", b"twp"))

    with pytest.raises(SnapshotError, match="is damaged: its name does not match its content"):
        load_snapshots(made, token, trust=True)


def test_envs_that_an_older_version_signed_are_loaded(made: RunFolder) -> None:
    token = "0123456789abcdef"
    body = (1).to_bytes(4, "little") + (3).to_bytes(8, "little") + b"one"
    seal = hmac.new(signatures.user_key(), token.encode() + body, "sha256").digest()
    snapshot_path(made, token).write_bytes(b"ml_pipeline envs 2\n" + seal + body)

    assert load_snapshots(made, token, trust=False) == [b"one"]


@pytest.fixture(scope="module", params=RUNS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its exported policies and the key of the user."""
    pytest.importorskip("onnxscript", reason="needs the extra: pip install -e '.[export]'")
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        run = str(train(RUNS[request.param]).run_dir)
        for file_format in ("onnx", "pt2"):
            assert main(["export", run, "--format", file_format]) == 0
    return folder


class Outcome(NamedTuple):
    """What a command printed, and what it returned or trained."""

    printed: str
    made: object


def outcome(command: str, run: Path, capsys: Capture, *, trust: bool) -> Outcome:
    """Run a command on a run or on one of its exported policies."""
    signatures.warn_once.cache_clear()
    made: object
    if command == "resume":
        words = [f"resume={run}", "total_steps=96", *(["trust=true"] if trust else [])]
        made = exit_code(lambda: train(words)) or checkpoint_numbers(run)
    elif command == "compare":  # without the report, which takes seconds
        made = exit_code(lambda: read_run(run, plain_config(run, trust=trust), trust=trust))
    elif command == "runs":
        made = main(["runs"])
    else:
        verb, path = ("evaluate", run) if command == "evaluate" else ("play", run / command)
        made = main([verb, str(path), "--episodes", "1", *(["--trust"] if trust else [])])
    printed = re.sub(
        r"[\d.,]+ env steps/s|steps/s .*|took: .*|ETA \S+", "", "".join(capsys.readouterr())
    )
    return Outcome(printed, made)


def readers(path: Path) -> list[str]:
    """The commands that read a file of a run."""
    if path.suffix in (".onnx", ".pt2"):
        return [path.name]
    if path.suffix in (".rows", ".envs") or path.name == "latest.pt":
        return ["resume"]
    if path.name == "best.pt":
        return ["evaluate"]
    if path.name == "metrics.csv":
        return ["resume", "compare"]
    assert path.name in ("config.yaml", "summary.json")
    return ["resume", "evaluate", "compare", "runs"]


@pytest.mark.slow
@pytest.mark.xdist_group("damage")  # the runs are trained once
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trust", [False, True])
def test_changed_byte_is_reported_or_changes_nothing(
    trust: bool, trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(trained / "config"))
    whole, chance = only_run(trained), random.Random(trust)
    run = here / "runs" / "env" / whole.name
    expected: dict[str, Outcome] = {}

    def after(command: str, file: Path | None = None, content: bytes = b"") -> Outcome:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        if file is not None:
            (run / file).write_bytes(content)
        return outcome(command, run, capsys, trust=trust)

    n_reported = 0
    wrong = []
    for path in sorted(whole.rglob("*")):
        if path.is_dir() or path.name in UNREAD or (trust and path.suffix not in SIGNED):
            continue
        content, file = path.read_bytes(), path.relative_to(whole)
        # The ends hold checksums and signatures.
        for place in (0, len(content) - 1, *chance.choices(range(len(content)), k=2)):
            changed = bytearray(content)
            changed[place] ^= 1 << chance.randrange(8)
            for command in readers(file):
                if command not in expected:
                    expected[command] = after(command)
                found = after(command, file, bytes(changed))
                is_named = file.name in found.printed
                if is_named and (found.made == 1 or file.name not in expected[command].printed):
                    n_reported += 1
                # metrics.csv is a log: a changed digit may stay, but nothing crashes.
                elif found != expected[command] and file.name != "metrics.csv":
                    wrong.append((str(file), place, command, found.printed))
    assert wrong == []
    assert n_reported > (20 if trust else 30)
