"""Checkpoints and run folders: files are complete or absent, and reading them runs no code."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from conftest import small

from ml_pipeline.build import load_agent, train
from ml_pipeline.runs.checkpoint import LATEST, CheckpointError, load_checkpoint, save_checkpoint
from ml_pipeline.runs.env_snapshots import load_snapshots, save_snapshots, sweep_snapshots
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, write_atomically, write_text

N_KILLS = int(os.environ.get("KILLS", "12"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.unused(tmp_path, "Some/Env:v1")
    run.make()
    return run


def test_loaded_state_equals_the_saved_one(run: RunFolder) -> None:
    state = {"weights": torch.arange(3.0), "count": 3, "name": "x", "parts": [[1.0, 2]]}

    save_checkpoint(run, LATEST, state)
    loaded = load_checkpoint(run, LATEST)

    assert torch.equal(loaded["weights"], state["weights"])
    assert (loaded["count"], loaded["name"], loaded["parts"]) == (3, "x", [[1.0, 2]])


class Malice:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code ran')",)


def test_checkpoint_that_contains_code_is_refused(run: RunFolder) -> None:
    content = io.BytesIO()
    torch.save({"format": 2, "agent": Malice()}, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    sealed = content.getvalue() + f"\nml_pipeline sha256 {digest}\n".encode()
    (run.checkpoints / "latest.pt").write_bytes(sealed)

    with pytest.raises(CheckpointError, match=r"latest\.pt cannot be read: it contains more than"):
        load_checkpoint(run, LATEST)


@pytest.mark.parametrize("damage", ["empty", "half", "text", "other format", "flipped"])
def test_damaged_checkpoint_is_refused_in_one_line(run: RunFolder, damage: str) -> None:
    save_checkpoint(run, LATEST, {"weights": torch.zeros(1000)})
    path = run.checkpoints / "latest.pt"
    content = path.read_bytes()
    contents = [{"empty": b"", "half": content[: len(content) // 2]}.get(damage, b"hello")]
    if damage == "other format":
        torch.save({"format": 99}, path)
        contents = [path.read_bytes()]
    elif damage == "flipped":
        ends = [0, len(content) - 1, len(content) - 40]
        places = [*ends, *random.Random(1).sample(range(len(content)), 40)]
        contents = [
            content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]
            for place in places
        ]

    for each in contents:
        path.write_bytes(each)
        words = r"latest\.pt (is not a checkpoint|is damaged)[^\n]*$"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(run, LATEST)


def test_missing_checkpoint_is_named(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint best\.pt"):
        load_checkpoint(run, "best")


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)

    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def save_forever(run: RunFolder, number: int, saved: Connection) -> None:
    while True:
        number += 1
        token = save_snapshots(run, [b"x" * 10_000, str(number).encode()])
        state = {"number": number, "weights": torch.full((10_000,), number), "token": token}
        save_checkpoint(run, LATEST, state)
        sweep_snapshots(run, keep=token)
        saved.send(number)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
@pytest.mark.timeout(60 + N_KILLS)
def test_kill_while_saving_leaves_a_complete_checkpoint_with_its_envs(run: RunFolder) -> None:
    fork, chance, number = multiprocessing.get_context("fork"), random.Random(1), -1
    for _ in range(N_KILLS):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=save_forever, args=(run, number, sender))
        process.start()
        sender.close()
        number = receiver.recv()
        time.sleep(chance.random() * 0.02)  # kills at different points of a save
        process.kill()
        process.join()
        while receiver.poll():
            try:
                number = receiver.recv()
            except EOFError:
                break

        state = load_checkpoint(run, LATEST)
        assert state["number"] >= number  # no save that returned is lost
        number = state["number"]
        assert set(state["weights"].tolist()) == {float(number)}
        snapshots = load_snapshots(run, state["token"], trust=False)
        assert snapshots[1] == str(number).encode()
        run.sweep()
        assert not list(run.checkpoints.glob(".*.tmp"))


def test_env_name_with_slashes_becomes_one_folder(run: RunFolder) -> None:
    assert run.path.parent.name == "Some-Env-v1"


def test_folder_without_a_config_is_not_a_run(run: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"it has no config\.yaml"):
        RunFolder.open(run.path)


def test_one_file_holds_the_agent_and_its_config_and_load_agent_restores_it(here: Path) -> None:
    result = train([*small(total_steps=32), "agent.normalize_obs=true", "vec_env=serial"])

    # Anyone can read it without this package.
    state = torch.load(result.run_dir / "checkpoints" / "latest.pt", weights_only=True)
    loaded = load_agent(result.run_dir, LATEST)

    assert state["agent"]["model"]["actor.layers.0.weight"].shape == (64, 4)
    assert state["agent"]["model"]["preprocess.moments.0.mean"].shape == (4,)
    assert state["agent"]["spaces"]["action_space"] == {"kind": "Discrete", "n": 2, "start": 0}
    assert "normalize_obs: true" in state["config"]
    assert loaded.env_steps == 32
    for ours, theirs in zip(
        result.agent.model.parameters(), loaded.agent.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
