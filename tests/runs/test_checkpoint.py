"""Checkpoints and run folders: files are complete or absent, and reading them runs no code."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from conftest import Trap, small

from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.runs.checkpoint import LATEST, CheckpointError, load_checkpoint, save_checkpoint
from ml_pipeline.runs.env_snapshots import load_snapshots, save_snapshots, sweep_snapshots
from ml_pipeline.runs.run_folder import RunFolder, write_atomically, write_text

N_KILLS = int(os.environ.get("KILLS", "12"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.unused(tmp_path, "Some/Env:v1")
    run.make()
    return run


def test_checkpoint_that_contains_code_is_refused(run: RunFolder, here: Path) -> None:
    content = io.BytesIO()
    torch.save({"format": 2, "agent": Trap()}, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    sealed = content.getvalue() + f"\nml_pipeline sha256 {digest}\n".encode()
    (run.checkpoints / "latest.pt").write_bytes(sealed)

    with pytest.raises(CheckpointError, match=r"latest\.pt cannot be read: it contains more than"):
        load_checkpoint(run, LATEST)

    assert not (here / "sprung").exists()


def flipped(content: bytes) -> Iterator[bytes]:
    """Copies with one wrong bit: at both ends, in the digest, and at random places."""
    ends = [0, len(content) - 1, len(content) - 40]
    for place in [*ends, *random.Random(1).sample(range(len(content)), 40)]:
        yield content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def test_damaged_checkpoint_is_refused_in_one_line(run: RunFolder) -> None:
    path = run.checkpoints / "latest.pt"
    torch.save({"format": 99}, path)
    other_format = path.read_bytes()
    save_checkpoint(run, LATEST, {"weights": torch.zeros(1000)})
    content = path.read_bytes()

    for damaged in (b"", b"hello", content[: len(content) // 2], other_format, *flipped(content)):
        path.write_bytes(damaged)
        words = r"latest\.pt (is not a checkpoint|is damaged)[^\n]*$"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(run, LATEST)

    save_checkpoint(run, "best", {"weights": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"latest\.pt .*; the same folder has best\.pt$"):
        load_checkpoint(run, LATEST)


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
