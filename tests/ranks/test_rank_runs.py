"""Runs of several ranks: stop signals, exact resume, and ranks that fail."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_runs import torchrun
from started_ranks import (
    OPTIONS,
    SIZE,
    TRAIN,
    children,
    ended,
    is_running,
    needs_proc,
    rank_pid,
    read_until,
    run_folder,
    start,
)
from stopped_runs import checkpoint_numbers


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("receiver", "options"),
    [("rank 1", ["vec_env=serial"]), ("torchrun", ["env=torch_pendulum"])],
    ids=["signal to a rank", "signal to torchrun, tensor envs"],
)
def test_stopped_ranks_resume_bit_for_bit(
    receiver: str, options: list[str], tmp_path: Path
) -> None:
    complete = ended(start(tmp_path / "whole", *options, SIZE))
    stopped = start(tmp_path / "stopped", *options, SIZE)
    read_until(stopped, "iteration 1 ")
    pid = stopped.pid if receiver == "torchrun" else rank_pid(stopped.pid, 1)
    os.kill(pid, signal.SIGTERM)
    output = ended(stopped)
    run = run_folder(tmp_path / "stopped")

    resumed = ended(torchrun(2, TRAIN, f"resume={run}"))

    assert "finished at env step 3,840 of 3,840" in complete, complete
    assert "stopped by SIGTERM" in output, output
    assert "resume with: torchrun --nproc_per_node=2" in output
    assert "in the middle of its episodes" in resumed, resumed
    assert checkpoint_numbers(run) == checkpoint_numbers(run_folder(tmp_path / "whole"))


@pytest.mark.slow
def test_another_number_of_ranks_resumes_with_new_episodes(tmp_path: Path) -> None:
    ended(start(tmp_path, "vec_env=serial", "total_steps=512"))
    run = run_folder(tmp_path)

    command = [sys.executable, TRAIN, f"resume={run}", "total_steps=1024"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=180)

    assert "with new episodes: 2 ranks saved them, this run has 1" in resumed.stdout
    assert "finished at env step 1,024 of 1,024" in resumed.stdout
    assert checkpoint_numbers(run)["['agent']['model']['preprocess.moments.0.count']"] == 1024


@needs_proc
@pytest.mark.slow
def test_killed_rank_is_named_and_no_worker_survives(tmp_path: Path) -> None:
    process = start(tmp_path, "vec_env=parallel", "vec_env.n_workers=2", "total_steps=1e7")
    read_until(process, "iteration 1 ")
    processes = children(process.pid)

    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    output = ended(process)

    assert process.returncode != 0
    assert re.search(rf"rank 1 on {platform.node()}: killed, cut off or hanging", output), output
    assert len(processes) >= 6  # 2 ranks with 2 workers each
    assert [pid for pid in processes if is_running(pid)] == []


def output_of_fault(folder: Path, env: str, *overrides: str) -> str:
    """Train until the env of rank 1 fails in the way of ``env``; returns what torchrun printed."""
    gate = folder / "gate"
    options = [*OPTIONS[1:], f"env.target=faulty_envs.{env}", f"+env.kwargs.gate={gate}"]
    options += [f"run_root={folder}", "vec_env=serial", "total_steps=1e7", *overrides]
    process = torchrun(2, TRAIN, *options)
    read_until(process, "iteration 1 ")
    gate.touch()
    output = ended(process)
    assert process.returncode != 0
    return output


@pytest.mark.slow
def test_mistake_in_the_config_is_reported_by_one_rank(tmp_path: Path) -> None:
    output = ended(start(tmp_path, "agent.gama=0.9"))

    assert output.count("did you mean agent.gamma=0.9?") == 1, output


@pytest.mark.slow
def test_error_of_an_env_reaches_the_other_rank_with_its_cause(tmp_path: Path) -> None:
    output = output_of_fault(tmp_path, "BreaksOnRankOne")

    named = rf"rank 1 on {platform.node()}: .*the puck left the table"
    assert re.search(named, output), output
    assert "failed with RankError" in output  # rank 0 ended its record


@pytest.mark.slow
def test_error_of_an_env_of_rank_0_is_named(tmp_path: Path) -> None:
    output = output_of_fault(tmp_path, "BreaksOnRankOne", "+env.kwargs.rank=0")

    assert "failed with WorkerError" in output, output
    assert "the puck left the table" in output
    assert (run_folder(tmp_path) / "checkpoints" / "latest.pt").is_file()


@pytest.mark.slow
def test_hanging_rank_is_named_after_the_deadline_and_ends(tmp_path: Path) -> None:
    output = output_of_fault(tmp_path, "HangsOnRankOne", "rank_timeout_seconds=5")

    assert f"rank 1 on {platform.node()}: killed, cut off or hanging" in output
    assert re.search(r"rank 1 on .*: hanging in .*faulty_envs.py:\d+", output), output


TWO_RUNS = """
import sys
import torch.distributed as dist
import ml_pipeline.ranks.world
from ml_pipeline import train

groups, init = [], dist.init_process_group

def init_and_keep(*args, **options):
    init(*args, **options)
    groups.append(dist.group.WORLD)

dist.init_process_group = init_and_keep
ml_pipeline.ranks.world.is_usable = lambda: False  # as on several machines
for seed in (1, 2):
    train(sys.argv[1:], seed=seed, num_episodes=2)
"""


@pytest.mark.slow
def test_runs_of_one_process_end_although_torch_keeps_their_connections(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_RUNS)
    output = ended(torchrun(2, str(script), *OPTIONS, f"run_root={tmp_path / 'runs'}"))

    assert output.count("finished at env step") == 2, output
