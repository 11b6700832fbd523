"""Runs, sweeps and studies as jobs of a real Slurm on this machine, with two nodes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import (
    REPOSITORY,
    Capture,
    Door,
    Start,
    only_run,
    read_rows,
    small,
    summary_of,
    wait_until,
)
from slurm_cluster import SlurmCluster, running_cluster

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.sweeps import (
    JobNote,
    check_launcher,
    note_lost_job,
    noted_job,
    read_jobs,
    requeued_run,
)
from ml_pipeline.errors import UserError

group = pytest.mark.xdist_group("slurm")  # its tests share a cluster
FOREVER = {"total_steps": 10**9, "callbacks__evaluation__eval_every_steps": 32}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: SlurmCluster, here: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, for all commands of this test; its jobs can import this repository."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return cluster


def script_of(page: str, folder: Path) -> str:
    """The batch script of a page of the docs, as a file in ``folder``."""
    text = (REPOSITORY / "docs" / page).read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", text, flags=re.DOTALL)
    path = folder / "script.sh"
    path.write_text(script)
    return str(path)


@group
@pytest.mark.slow
def test_sweep_runs_its_jobs_in_slurm_and_reports_failures_in_one_line(
    slurm: SlurmCluster, door: Door, here: Path, capsys: Capture
) -> None:
    resources = ["partition=short", "timeout_min=7", "cpus_per_task=2", "account=lab"]
    launcher = [f"hydra.launcher.{each}" for each in resources]

    result = door("-m", "sweep=slurm", "seed=1,2,-3", *small(), *launcher)

    assert result.returncode == 1
    assert result.stderr == ""
    (folder,) = here.glob("runs/sweeps/*")
    jobs = read_jobs(folder)
    assert [job.status for job in jobs] == ["finished", "finished", "failed"]
    first, *lines = result.stdout.partition("\nsweep ")[0].splitlines()
    assert re.fullmatch(r"Slurm job (\d+): 3 runs; squeue --jobs=\1 shows its state", first)
    assert {line[:7] for line in lines} == {f"job {n}: " for n in range(3)}
    failed = [line for line in lines if line.startswith("job 2: failed")]
    assert len(failed) == 1
    assert "seed=-3" in failed[0]
    assert "2 of 3 jobs finished" in result.stdout
    array = first.split()[2].rstrip(":")
    words = ["squeue", "--noheader", "--states=all", f"--jobs={array}"]
    facts = slurm.call(*words, "--array", "--format=%P %l %C %m %a").splitlines()
    assert facts == ["short 7:00 2 8G lab"] * 3
    (script,) = folder.glob(".submitit/*/*_submission.sh")
    assert "srun --unbuffered" in script.read_text()
    assert "--cpus-per-task=2 " in script.read_text().partition("srun ")[2]
    runs = [here / str(job.run_dir) for job in jobs[:2]]
    assert [summary_of(run)["status"] for run in runs] == ["finished"] * 2
    assert [len(read_rows(run)) for run in runs] == [2, 2]
    assert main(["runs"]) == 0
    assert main(["compare", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert [run.name in printed for run in runs] == [True, True]


@pytest.fixture
def long_sweep(
    slurm: SlurmCluster, started: Start, here: Path
) -> Callable[[], tuple[subprocess.Popen[str], str]]:
    """Starts a sweep of three jobs, of which two train for days; returns the id of the array."""

    def start() -> tuple[subprocess.Popen[str], str]:
        launcher = ["hydra.launcher.array_parallelism=2"]
        process = started("-m", "sweep=slurm", "seed=1,2,3", *small(**FOREVER), *launcher)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Slurm job "), line
        wait_until(lambda: len(list(here.glob("runs/*/*/checkpoints/best.pt"))) == 2, 60)
        return process, line.split()[2].rstrip(":")

    return start


@group
@pytest.mark.slow
def test_preempted_job_of_a_sweep_resumes_and_cancelled_jobs_are_reported(
    slurm: SlurmCluster, long_sweep: Callable[[], tuple[subprocess.Popen[str], str]], here: Path
) -> None:
    process, array = long_sweep()
    (folder,) = here.glob("runs/sweeps/*")

    def run_of(job: int) -> Path:
        return here / str(read_jobs(folder)[job].run_dir)

    first = run_of(0)
    slurm.call("scontrol", "requeue", f"{array}_0")
    wait_until(lambda: summary_of(first)["status"] == "interrupted", 20)
    slurm.call("scancel", f"{array}_2", f"{array}_1")
    wait_until(lambda: len(summary_of(first)["commands"]) == 2, 40)
    wait_until(lambda: summary_of(first)["status"] == "running", 20)
    assert run_of(0) == first
    slurm.call("scancel", array)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 1, stderr
    assert "Traceback" not in stdout + stderr
    jobs = read_jobs(folder)
    assert [job.status for job in jobs] == ["interrupted", "interrupted", "failed"]
    assert jobs[2].error == f"Slurm ended job {array}_2 (CANCELLED)"
    assert "0 of 3 jobs finished" in stdout
    assert "job 0: resumed" in stdout
    steps = [int(float(row["env_steps"])) for row in read_rows(first)]
    assert steps == list(range(32, steps[-1] + 32, 32))


@group
@pytest.mark.slow
def test_jobs_stay_in_the_queue_after_ctrl_c(slurm: SlurmCluster, started: Start) -> None:
    process = started(
        "-m", "sweep=slurm", "seed=1,2", "+hydra.launcher.additional_parameters.hold=true"
    )
    assert process.stdout is not None
    array = process.stdout.readline().split()[2].rstrip(":")

    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)

    assert process.returncode == 130, stderr
    assert stdout == f"the runs continue in Slurm; to save and stop them: scancel {array}\n"
    assert slurm.states(array) == ["PENDING"] * 2
    slurm.call("scancel", array)


@group
@pytest.mark.slow
def test_partition_that_does_not_exist_is_reported_in_one_line(
    slurm: SlurmCluster, door: Door
) -> None:
    result = door("-m", "sweep=slurm", "seed=1,2", "hydra.launcher.partition=nope")

    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("sbatch refused the jobs: sbatch: error: invalid partition specified")


@group
@pytest.mark.slow
def test_script_of_the_docs_trains_on_two_nodes_saves_when_stopped_and_resumes(
    slurm: SlurmCluster, here: Path
) -> None:
    (here / "train_ppo.py").symlink_to(REPOSITORY / "train_ppo.py")
    sizes = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--partition=short"]
    settings = small(total_steps=10**9, callbacks__checkpoints__every_steps=64)

    job = slurm.submit(*sizes, "--time=10", script_of("scale.md", here), *settings, cwd=here)
    log = here / f"slurm_{job}.log"
    wait_until(lambda: len(list(here.glob("runs/*/*/checkpoints/latest.pt"))) == 1, 60)
    run = only_run(here)
    assert run.name.endswith(f"_slurm{job}")
    slurm.call("scancel", "--signal=TERM", job)  # as at the time limit
    wait_until(lambda: summary_of(run)["status"] == "interrupted", 30)
    wait_until(lambda: len(summary_of(run)["commands"]) == 2, 60)
    slurm.call("scancel", job)
    states = slurm.wait_for_end(job, 40)

    assert states == ["CANCELLED"]
    wait_until(lambda: summary_of(run)["status"] == "interrupted", 20)
    assert only_run(here) == run
    assert "resumed" in log.read_text()
    steps = [int(float(row["env_steps"])) for row in read_rows(run)]
    assert steps == list(range(64, steps[-1] + 64, 64))  # 16 steps of 2 envs on 2 ranks


@group
@pytest.mark.slow
def test_script_of_the_docs_joins_a_study_from_several_jobs(
    slurm: SlurmCluster, here: Path
) -> None:
    pytest.importorskip("optuna", reason="needs the extra: pip install -e '.[study]'")
    from ml_pipeline.study.folder import StudyFolder

    (here / "space.yaml").write_text("agent.learning_rate: {low: 1e-4, high: 1e-2, log: true}\n")
    both = "+callbacks.both._target_=own_parts.AwaitTwoTrials"
    words = ["mine", "n_trials=5", "space=space.yaml", both, *small()]
    sizes = ["--array=1-2", "--cpus-per-task=1", "--time=10"]

    job = slurm.submit(*sizes, script_of("studies.md", here), *words, cwd=here)
    states = slurm.wait_for_end(job, 90)

    logs = [path.read_text() for path in sorted(here.glob("study_*.log"))]
    assert states == ["COMPLETED"] * 2, logs
    trials = StudyFolder("mine").study().get_trials(deepcopy=False)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 5
    assert len({trial.user_attrs["run_dir"] for trial in trials}) == 5
    assert len({trial.user_attrs["pid"] for trial in trials}) == 2  # both jobs trained
    assert len(list(here.glob("runs/CartPole-v1/*"))) == 5
    assert ["study mine has all 5 trials" in log for log in logs] == [True, True]


def test_sweep_without_slurm_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    check_launcher(["-m", "sweep=submitit_local", "seed=1,2"])
    with pytest.raises(UserError, match="sweep=slurm: no sbatch on the PATH"):
        check_launcher(["-m", "sweep=slurm", "seed=1,2"])


def test_job_that_slurm_started_again_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with noted_job(tmp_path, 1, ["seed=1"]) as note:
        note.started(run)
        note.stopped()

    assert requeued_run(tmp_path, 1) is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeued_run(tmp_path, 1) is None  # it had not saved yet
    (run / "checkpoints" / "latest.pt").touch()
    assert requeued_run(tmp_path, 1) == run
    assert requeued_run(tmp_path, 0) is None


def test_job_that_slurm_ended_is_recorded_unless_it_recorded_its_own_end(tmp_path: Path) -> None:
    with noted_job(tmp_path, 0, []) as note:
        note.stopped()
    JobNote(tmp_path, 1, ["seed=2"]).started("runs/x")

    for number in range(3):
        note_lost_job(tmp_path, number, ["seed=2"], "Slurm ended job 7 (TIMEOUT)")

    jobs = read_jobs(tmp_path)
    assert [job.status for job in jobs] == ["interrupted", "failed", "failed"]
    assert [job.error for job in jobs] == [
        None,
        "Slurm ended job 7 (TIMEOUT); continue with resume=runs/x",
        "Slurm ended job 7 (TIMEOUT)",
    ]
