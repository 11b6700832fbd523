"""Runs of DQN and SAC on several ranks: exact resume after a stop and a kill, and their files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Capture, read_rows
from rank_runs import torchrun
from started_ranks import ended, needs_proc, rank_pid, read_until, run_folder
from stopped_runs import checkpoint_numbers

from ml_pipeline.__main__ import main
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.run_folder import RunFolder

OPTIONS = [
    *("n_envs=4", "vec_env=serial", "device=cpu", "logger=[]", "~callbacks.evaluation"),
    *("agent.iteration_length=8", "agent.learning_starts=64", "agent.batch_size=16"),
    *("agent.buffer_size=400", "agent.normalize_obs=true", "network.hidden_sizes=[16]"),
    *("agent.updates_per_env_step=0.125", "callbacks.checkpoints.every_steps=256"),
]
AGENTS = {
    "sac": ["env=pendulum", "agent.policy_delay=2"],
    "dqn": ["env=cartpole", "agent.priority_exponent=0.6", "agent.n_step=3"],
}
SIZE = "total_steps=1536"  # 24 iterations
pytestmark = pytest.mark.xdist_group("rank_replay_runs")  # tests share complete runs
SCRIPTS = {name: str(REPOSITORY / f"train_{name}.py") for name in AGENTS}


def start(agent: str, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    script, options = SCRIPTS[agent], [*AGENTS[agent], *OPTIONS]
    return torchrun(2, script, *options, f"run_root={folder}", *overrides)


@pytest.fixture(scope="module", params=list(AGENTS))
def complete(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of an agent, and a run of two ranks that nothing interrupted."""
    folder = tmp_path_factory.mktemp("complete")
    output = ended(start(request.param, folder, SIZE))
    assert "finished at env step 1,536 of 1,536" in output, output
    return request.param, run_folder(folder)


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    while not (run / "checkpoints" / "latest.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)


def numbers(run: Path) -> dict[str, Any]:
    """The latest checkpoint without the names of its files, and the last row of each rank."""
    found = {name: each for name, each in checkpoint_numbers(run).items() if "'name'" not in name}
    parts = load_checkpoint(RunFolder.open(run), LATEST)["ranks"]
    for rank, part in enumerate(parts):
        # The rows of a segment: a stop leaves other segments than an unbroken run.
        for segment in part["replay"]["segments"]:
            rows = LargeFiles(RunFolder(run)).read(segment["name"])
            n_rows = segment["last"] - segment["first"]
            for name in ("obs ", "action", "reward", "done"):
                values = rows[name].view(n_rows, 4, -1).tolist()
                rest = enumerate(values, segment["first"])
                found |= {f"rank {rank}, row {t}, {name}": row for t, row in rest}
    return {name: each for name, each in found.items() if "segments" not in name}


def assert_equal_runs(broken: Path, whole: Path) -> None:
    ours, theirs = numbers(broken), numbers(whole)
    oldest = 1536 // 8 - 50  # earlier rows have left the buffer, and may have left the files
    row_of = {name: int(name.split()[3][:-1]) for name in {*ours, *theirs} if ", row " in name}
    names = [name for name in theirs if row_of.get(name, oldest) >= oldest]
    assert sum(name in row_of for name in names) == 2 * 50 * 4
    assert [name for name in names if ours[name] != theirs[name]] == []
    assert read_rows(broken) == read_rows(whole)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("complete", ["sac"], indirect=True)
def test_stopped_ranks_with_replay_resume_bit_for_bit(complete: Any, tmp_path: Path) -> None:
    agent, whole = complete
    stopped = start(agent, tmp_path, SIZE)
    read_until(stopped, "iteration 1 ")
    os.kill(rank_pid(stopped.pid, 1), signal.SIGTERM)
    output = ended(stopped)
    run = run_folder(tmp_path)

    resumed = ended(torchrun(2, SCRIPTS[agent], f"resume={run}"))

    assert "stopped by SIGTERM" in output, output
    assert "in the middle of its episodes" in resumed, resumed
    assert_equal_runs(run, whole)


@needs_proc
@pytest.mark.slow
def test_stopped_ranks_with_replay_of_tensor_envs_resume_bit_for_bit(tmp_path: Path) -> None:
    options = ["env=torch_pendulum", "vec_env=auto", "+env.kwargs.max_episode_steps=50", SIZE]
    complete = ended(start("sac", tmp_path / "whole", *options))
    stopped = start("sac", tmp_path / "stopped", *options)
    read_until(stopped, "iteration 1 ")
    os.kill(stopped.pid, signal.SIGTERM)
    output = ended(stopped)
    run = run_folder(tmp_path / "stopped")

    resumed = ended(torchrun(2, SCRIPTS["sac"], f"resume={run}"))

    assert "finished at env step 1,536 of 1,536" in complete, complete
    assert "stopped by SIGTERM" in output, output
    assert "in the middle of its episodes" in resumed, resumed
    assert_equal_runs(run, run_folder(tmp_path / "whole"))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("complete", ["dqn"], indirect=True)
def test_killed_ranks_with_replay_resume_bit_for_bit(complete: Any, tmp_path: Path) -> None:
    agent, whole = complete
    killed = start(agent, tmp_path, SIZE)
    read_until(killed, "iteration 1 ")
    run = run_folder(tmp_path)
    wait_for_checkpoint(run, killed)
    os.kill(rank_pid(killed.pid, 1), signal.SIGKILL)
    output = ended(killed)
    saved = load_checkpoint(RunFolder.open(run), LATEST)["env_steps"]

    resumed = ended(torchrun(2, SCRIPTS[agent], f"resume={run}"))

    assert re.search("rank 1 on .*: killed, cut off or hanging", output), output
    assert saved % 256 == 0
    assert saved < 1536
    assert f"resumed at env step {saved:,} in the middle of its episodes" in resumed, resumed
    assert_equal_runs(run, whole)


@pytest.mark.slow
def test_another_number_of_ranks_keeps_all_transitions(
    complete: Any, tmp_path: Path, capsys: Capture
) -> None:
    agent, whole = complete
    run = tmp_path / "run"
    run.parent.mkdir(exist_ok=True)
    subprocess.run(["cp", "-r", str(whole), str(run)], check=True)
    command = [sys.executable, SCRIPTS[agent], f"resume={run}", "total_steps=1600"]

    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    resumed = subprocess.run([*command, "n_envs=8"], capture_output=True, text=True, timeout=60)

    assert "4 envs on 1 rank, but its replay has 8; use n_envs=8" in refused.stderr, refused
    assert "with new episodes: 2 ranks saved them, this run has 1" in resumed.stdout, resumed
    assert float(read_rows(run)[-1]["replay/size"]) == 400
    assert main(["replay", str(run)]) == 0
    assert re.search(r"rows +50 of 8 envs", capsys.readouterr().out)


@pytest.mark.slow
def test_ranks_write_only_new_transitions_and_remove_old_files(complete: Any) -> None:
    _, whole = complete
    parts = load_checkpoint(RunFolder.open(whole), LATEST)["ranks"]

    for part in parts:
        spans = [(each["first"], each["last"]) for each in part["replay"]["segments"]]
        assert spans == [(128, 160), (160, 192)]  # 50 rows in files of 256 / 8 rows
    named = [each["name"] for part in parts for each in part["replay"]["segments"]]
    assert sorted(path.name for path in (whole / "replay").iterdir()) == sorted(named)


@pytest.mark.slow
def test_replay_command_covers_the_envs_of_all_ranks(complete: Any, capsys: Capture) -> None:
    _, whole = complete

    assert main(["replay", str(whole)]) == 0

    output = capsys.readouterr().out
    assert re.search(r"transitions +400\n", output), output
    assert re.search(r"rows +50 of 8 envs", output)
    assert "in 4 files, checksums match" in output


def damage(run: Path, rank: int, segment: int) -> None:
    """Change a byte of a file of transitions."""
    part = load_checkpoint(RunFolder.open(run), LATEST)["ranks"][rank]
    path = run / "replay" / part["replay"]["segments"][segment]["name"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# The files of each rank have rows 128 to 160 and 160 to 192 of 4 envs. If the newest rows are lost,
# those before them move up by 33: the last of them has lost its next observation.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("complete", "damaged", "n_kept", "moved"),
    [
        pytest.param("dqn", [(1, 0)], 256, 0, id="oldest of rank 1"),
        pytest.param("sac", [(0, 1)], 248, 33, id="newest of rank 0"),
        pytest.param("dqn", [(0, 0), (1, 1)], 0, 0, id="another of each rank"),
    ],
    indirect=["complete"],
)
def test_salvage_on_two_ranks_drops_the_rows_of_both(
    complete: Any, damaged: list[tuple[int, int]], n_kept: int, moved: int, tmp_path: Path
) -> None:
    agent, whole = complete
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for rank, segment in damaged:
        damage(run, rank, segment)
    resume = [SCRIPTS[agent], f"resume={run}"]

    refused = ended(torchrun(2, *resume, "total_steps=1600"))
    salvaged = ended(torchrun(2, *resume, "total_steps=1600", "salvage=true"))

    assert "add salvage=true" in refused, refused
    lost = f"salvage=true: {400 - n_kept} of 400 transitions are lost, and {n_kept} are kept"
    assert lost in salvaged, salvaged
    assert float(read_rows(run)[-1]["replay/size"]) == min(n_kept + 64, 400)
    ours, theirs = numbers(run), numbers(whole)
    for rank in (0, 1):
        for row in range(192 - n_kept // 8, 192):
            before = f"rank {rank}, row {row - moved}, action"
            assert ours[f"rank {rank}, row {row}, action"] == theirs[before]
    assert main(["replay", str(run)]) == 0


@pytest.mark.slow
def test_error_of_an_env_of_rank_0_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = ["env.id=null", "env.target=faulty_envs.BreaksOnRankOne", f"+env.kwargs.gate={gate}"]
    more = ["+env.kwargs.rank=0", "total_steps=1e7", f"run_root={tmp_path}"]
    process = torchrun(2, SCRIPTS["dqn"], *OPTIONS, *env, *more)
    read_until(process, "iteration 1 ")
    run = run_folder(tmp_path)
    wait_for_checkpoint(run, process)

    gate.touch()
    output = ended(process)

    assert "the puck left the table" in output, output
    state = load_checkpoint(RunFolder.open(run), LATEST)
    assert len(state["ranks"]) == 2
    assert state["env_steps"] % 256 == 0
