"""Sweeps: jobs in parallel, their stop, and the table at the end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import (
    REPOSITORY,
    TESTS,
    Capture,
    Door,
    Start,
    is_running,
    only_run,
    small,
    summary_of,
    wait_until,
    wait_until_gone,
)
from rich.console import Console
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from ml_pipeline.assembly import sweeps
from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.assembly.sweeps import (
    Job,
    check_launcher,
    job_runs,
    jobs_table,
    noted_job,
    read_jobs,
    share_of_cores,
)
from ml_pipeline.assembly.words import as_settings
from ml_pipeline.envs.workers.cores import CORES_VARIABLE, available_cores
from ml_pipeline.errors import UserError
from ml_pipeline.extras import MissingExtraError
from ml_pipeline.runs.console import numbered_output


@pytest.mark.slow
def test_parallel_jobs_do_not_stop_when_another_fails(door: Door, here: Path) -> None:
    ids = "env.id=CartPole-v1,Nope-v0"

    result = door("-m", "sweep=local", ids, "seed=1,2", *small(), "hydra.launcher.n_jobs=2")

    assert result.returncode == 1
    (folder,) = (here / "runs" / "sweeps").iterdir()
    jobs = read_jobs(folder)
    assert [job.status for job in jobs] == ["finished", "finished", "failed", "failed"]
    assert [Path(str(job.run_dir)).is_dir() for job in jobs[:2]] == [True, True]
    assert len({job.pid for job in jobs[:2]}) == 2
    assert "2 of 4 jobs finished" in result.stdout
    assert "env.id=Nope-v0 is not a registered environment" in result.stdout
    assert "Traceback" not in result.stderr
    lines, _, end = result.stdout.partition("\nsweep ")
    assert {line[:7] for line in lines.splitlines()} == {f"job {n}: " for n in range(4)}
    assert sorted(line[:13] for line in result.stderr.splitlines()) == [
        "job 2: failed",
        "job 3: failed",
    ]
    assert ["compare:" in part for part in (lines, end)] == [False, True]


@pytest.mark.slow
def test_job_after_job_numbers_every_line_and_prints_the_commands_once(
    door: Door, here: Path
) -> None:
    talk = "+callbacks.talk._target_=own_parts.Talk"

    result = door("-m", "seed=1,2", *small(), "vec_env=serial", talk, PYTHONPATH=str(TESTS))

    assert result.returncode == 0, result.stderr
    lines, _, end = result.stdout.partition("\nsweep ")
    jobs = [[line for line in lines.splitlines() if line.startswith(f"job {n}: ")] for n in (0, 1)]
    assert lines.splitlines() == jobs[0] + jobs[1]
    for n, job in enumerate(jobs):
        assert [line.split(": ")[1].split(" ")[0] for line in job] == [
            f"seed={n + 1}",
            "CartPole-v1",
            "logged",
            "printed",
            "finished",
        ]
    assert [line.split(":")[0] for line in end.splitlines()[-2:]] == ["compare", "evaluate"]


def test_output_of_a_job_is_numbered_line_by_line(capsys: Capture) -> None:
    with numbered_output(3):
        print("one\ntwo", end="")
        assert capsys.readouterr().out == "job 3: one\n"
        print("", file=sys.stderr)
    print("after")

    captured = capsys.readouterr()
    assert captured.out == "job 3: two\nafter\n"
    assert captured.err == "job 3: \n"


@pytest.mark.slow
def test_submitit_runs_a_sweep_on_this_machine(door: Door, here: Path) -> None:
    result = door("-m", "sweep=submitit_local", "seed=1,2", *small(), "vec_env=parallel")

    assert result.returncode == 0, result.stderr
    assert "2 of 2 jobs finished" in result.stdout


@pytest.fixture
def local_sweep(started: Start, here: Path) -> Iterator[tuple[subprocess.Popen[str], list[Job]]]:
    """A sweep of two parallel jobs with workers that would train for days, and its records."""
    settings = small(total_steps=10**9, callbacks__evaluation__eval_every_steps=32)
    settings += ["vec_env=parallel", "hydra.launcher.n_jobs=2"]
    process = started("-m", "sweep=local", "seed=1,2,3", *settings)

    def running() -> list[Job]:
        folders = list(here.glob("runs/sweeps/*"))
        return [job for job in read_jobs(folders[0]) if job.status == "running"] if folders else []

    wait_until(lambda: len(running()) == 2, 60)
    wait_until(lambda: len(list(here.glob("runs/CartPole-v1/*/checkpoints/best.pt"))) == 2, 60)
    jobs = running()
    yield process, jobs
    for job in jobs:
        if is_running(job.pid):
            os.kill(job.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_sweep_saves_every_job_and_starts_no_more_jobs(
    local_sweep: Any, here: Path, number: int, code: int
) -> None:
    process, jobs = local_sweep

    process.send_signal(number)
    stdout, _ = process.communicate(timeout=40)

    assert process.returncode == code
    (folder,) = here.glob("runs/sweeps/*")
    assert [job.status for job in read_jobs(folder)] == ["interrupted"] * 2
    assert {run.resolve() for run in job_runs(folder)} == set(here.glob("runs/CartPole-v1/*"))
    assert "0 of 2 jobs finished" in stdout
    runs = here.glob("runs/CartPole-v1/*")
    assert [summary_of(run)["status"] for run in runs] == ["interrupted"] * 2
    wait_until_gone([job.pid for job in jobs])


@pytest.mark.slow
def test_jobs_end_after_their_sweep_is_killed(local_sweep: Any) -> None:
    process, jobs = local_sweep

    process.kill()

    wait_until_gone([job.pid for job in jobs], 30)


def test_table_shows_only_differing_overrides_and_calls_an_unfinished_job_died() -> None:
    jobs = [
        Job(0, ["a=1", "b=2"], "finished", 1, "runs/x", 3.14),
        Job(1, ["a=1", "b=3"], "running", 1),
        Job(2, ["a=1", "b=4"], "failed", 1, error="no such env"),
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(jobs_table(jobs))

    lines = console.export_text().splitlines()
    assert lines[1].split() == ["0", "b=2", "finished", "3.14", "runs/x"]
    assert lines[2].split() == ["1", "b=3", "died", "-", "-"]
    assert lines[3].split()[:4] == ["2", "b=4", "failed", "-"]
    assert lines[3].rstrip().endswith("no such env")


def test_every_way_a_job_ends_is_recorded(tmp_path: Path) -> None:
    with noted_job(tmp_path, 0, []) as note:
        note.started("runs/x")
        note.finished(float("nan"))
    with pytest.raises(ZeroDivisionError), noted_job(tmp_path, 1, []):
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), noted_job(tmp_path, 2, []):
        raise KeyboardInterrupt

    jobs = read_jobs(tmp_path)
    assert [job.status for job in jobs] == ["finished", "failed", "interrupted"]
    assert jobs[0].objective is None  # JSON has no nan
    assert jobs[1].error == "ZeroDivisionError: division by zero"


def test_parallel_jobs_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_cores(1, 8) == 8
    assert share_of_cores(3, 8) == 2
    assert share_of_cores(100, 8) == 1
    assert share_of_cores(-1, 8) == 1

    monkeypatch.setenv(CORES_VARIABLE, "1")
    assert available_cores() == 1


def test_missing_launcher_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_launcher(["-m", "sweep=local", "seed=1,2"])
    monkeypatch.setitem(sweeps._LAUNCHERS, "local", "hydra_plugins.no.hydra_joblib_launcher")

    with pytest.raises(MissingExtraError, match=r"sweep=local needs .*: pip install .*\[sweep\]"):
        check_launcher(["-m", "sweep=local", "seed=1,2"])


def test_several_ranks_do_not_start_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    check_launcher(["seed=1"])
    with pytest.raises(UserError, match="-m: torchrun starts one run"):
        check_launcher(["-m", "seed=1,2"])


def documented_sweep() -> dict[str, Any]:
    text = (REPOSITORY / "docs" / "sweeps.md").read_text()
    return yaml.safe_load(text.partition("```yaml\n# sweep.yaml\n")[2].partition("```")[0])


def as_the_agent_writes(parameters: dict[str, Any]) -> list[str]:
    """W&B's own words for one choice of the values: the last of several, the least of a range."""
    chosen = {
        name: {"value": each.get("value", each.get("values", [each.get("min")])[-1])}
        for name, each in parameters.items()
    }
    return create_sweep_command_args({"args": chosen})["args"]


@pytest.mark.slow
@pytest.mark.parametrize("n_values", [1, 2])
def test_documented_sweep_of_wandb_trains_when_its_agent_calls_it(
    here: Path, door: Door, n_values: int
) -> None:
    sweep = documented_sweep()
    for each in sweep["parameters"].values():
        each.update({"values": each["values"][:n_values]} if "values" in each else {})
    words = as_the_agent_writes({**sweep["parameters"], "total_steps": {"value": 64}})
    assert sweep["program"] == "train_ppo.py"
    assert all(word.startswith("--") for word in words)
    fixed = [word for word in small() if not word.startswith(("total_steps", "logger"))]

    result = door(*words, *fixed, WANDB_SWEEP_ID="abc", WANDB_MODE="offline")

    assert result.returncode == 0, result.stderr
    config = plain_config(only_run(here))
    assert config["agent"]["learning_rate"] == 1e-4
    assert config["agent"]["max_kl"] == (None if n_values == 1 else 0.02)
    assert config["network"]["hidden_sizes"] == ([64, 64] if n_values == 1 else [256, 256])


def test_flags_without_an_agent_of_wandb_are_refused_and_those_of_hydra_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["train.py", "--seed=3", "agent.gamma=0.9", "--config-dir=c", "--agent.max_kl=None"]

    assert as_settings(words) == words
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert as_settings(words) == [
        *("train.py", "seed=3", "agent.gamma=0.9", "--config-dir=c", "agent.max_kl=null"),
    ]
