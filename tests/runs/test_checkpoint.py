"""Checkpoints: whole or not there, and no code runs when one is read."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import small

from ml_pipeline.build import load_agent, train
from ml_pipeline.runs.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, write_atomically, write_text


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.unused(tmp_path, "Some/Env:v1")
    run.make()
    return run


def test_a_state_comes_back_as_it_was(run: RunFolder) -> None:
    state = {"weights": torch.arange(3.0), "count": 3, "name": "x", "parts": [[1.0, 2]]}

    save_checkpoint(run, "latest", state)
    loaded = load_checkpoint(run, "latest")

    assert torch.equal(loaded["weights"], state["weights"])
    assert (loaded["count"], loaded["name"], loaded["parts"]) == (3, "x", [[1.0, 2]])


class Malice:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code ran')",)


def test_a_checkpoint_that_carries_code_is_refused(run: RunFolder) -> None:
    content = io.BytesIO()
    torch.save({"format": 2, "agent": Malice()}, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    whole = content.getvalue() + f"\nml_pipeline sha256 {digest}\n".encode()
    (run.checkpoints / "latest.pt").write_bytes(whole)

    with pytest.raises(CheckpointError, match=r"latest\.pt cannot be read: it holds more than"):
        load_checkpoint(run, "latest")


@pytest.mark.parametrize("damage", ["empty", "half", "text", "other format"])
def test_a_damaged_checkpoint_is_named_in_one_line(run: RunFolder, damage: str) -> None:
    save_checkpoint(run, "latest", {"weights": torch.zeros(1000)})
    path = run.checkpoints / "latest.pt"
    whole = path.read_bytes()
    if damage == "other format":
        torch.save({"format": 99}, path)
    else:
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"hello"}[damage])

    with pytest.raises(CheckpointError, match=r"latest\.pt (cannot be read|is no checkpoint)") as e:
        load_checkpoint(run, "latest")

    assert "\n" not in str(e.value)


def test_a_missing_checkpoint_is_named(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint best\.pt"):
        load_checkpoint(run, "best")


def test_a_failed_write_keeps_the_file_before_and_leaves_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)

    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_kill_while_saving_never_leaves_a_broken_checkpoint(run: RunFolder) -> None:
    script = f"""
import torch
from pathlib import Path
from ml_pipeline.runs.checkpoint import save_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
run = RunFolder(Path({str(run.path)!r}))
for count in range(1_000_000):
    save_checkpoint(run, "latest", {{"weights": torch.full((300_000,), float(count))}})
    if count == 1: print("saving", flush=True)
"""
    for kill_after in (0.0, 0.011, 0.023):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(kill_after)
        process.kill()
        process.wait()
        process.stdout.close()

        weights = load_checkpoint(run, "latest")["weights"]

        assert len(weights) == 300_000
        assert (weights == weights[0]).all()


def test_a_name_with_slashes_becomes_one_folder(run: RunFolder) -> None:
    assert run.path.parent.name == "Some-Env-v1"


def test_a_folder_without_a_config_is_no_run(run: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"it has no config\.yaml"):
        RunFolder.open(run.path)


def test_load_agent_gives_the_trained_policy(here: Path) -> None:
    result = train(small())
    loaded = load_agent(result.run_dir, "latest")

    for ours, theirs in zip(
        result.agent.model.parameters(), loaded.agent.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert loaded.env_steps == 64
