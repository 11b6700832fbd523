"""The habits of a run: when it evaluates, which checkpoints it keeps, how its workers do."""

from __future__ import annotations

import csv
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import read_rows, small
from tiny_envs import SlowEnv

from ml_pipeline.build import train
from ml_pipeline.callbacks.evaluation import PeriodicEvaluation
from ml_pipeline.callbacks.gpu import GpuReport
from ml_pipeline.callbacks.workers import WorkerReport
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.signals import Interrupted


def test_evaluations_come_every_so_many_steps_and_at_the_end(here: Path) -> None:
    settings = small(total_steps=32 * 7, callbacks__evaluation__eval_every_steps=64)

    rows = read_rows(train(settings).run_dir)

    evaluated = [int(row["env_steps"]) for row in rows if row["eval/episode_return"]]
    assert evaluated == [64, 128, 192, 224]


def test_evaluation_does_not_change_the_training(here: Path) -> None:
    often, never = (
        read_rows(train([*small(total_steps=128), *more]).run_dir)
        for more in (["callbacks.evaluation.eval_every_steps=1"], ["~callbacks.evaluation"])
    )

    strip = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in often]
    assert strip == never


def test_an_evaluation_that_was_cut_short_is_made_up_for_after_a_resume() -> None:
    def no_env() -> Any:
        raise Interrupted(signal.SIGINT)

    trainer: Any = SimpleNamespace(env_steps=100, is_last_iteration=lambda: False)
    stopped = PeriodicEvaluation(no_env, seed=1, eval_every_steps=100)  # type: ignore[arg-type]
    stopped.on_train_start(SimpleNamespace(env_steps=50))  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        stopped.on_iteration_end(trainer, {})
    resumed = PeriodicEvaluation(no_env, seed=1, eval_every_steps=100)  # type: ignore[arg-type]
    resumed.load_state_dict(stopped.state_dict())
    resumed.on_train_start(trainer)

    trainer.env_steps = 150
    with pytest.raises(Interrupted):  # it tries again
        resumed.on_iteration_end(trainer, {})


def test_best_is_the_checkpoint_of_the_best_evaluation(here: Path) -> None:
    settings = small(total_steps=320, callbacks__evaluation__eval_every_steps=32)
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir
    rows = read_rows(run)
    returns = [float(row["eval/episode_return"]) for row in rows]

    best = load_checkpoint(RunFolder.open(run), "best")
    latest = load_checkpoint(RunFolder.open(run), "latest")

    assert best["env_steps"] == int(rows[returns.index(max(returns))]["env_steps"])
    assert latest["env_steps"] == 320
    assert best["callbacks"]["checkpoints"]["best_return"] == max(returns)


def test_a_resumed_run_beats_its_old_best_or_keeps_it(here: Path) -> None:
    settings = small(total_steps=320, callbacks__evaluation__eval_every_steps=32)
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir

    train([f"resume={run}", "total_steps=640"])

    rows = read_rows(run)
    best = load_checkpoint(RunFolder.open(run), "best")["callbacks"]["checkpoints"]["best_return"]
    assert best == max(float(row["eval/episode_return"]) for row in rows)


def test_a_resumed_run_follows_the_schedule_it_is_given(here: Path) -> None:
    run = train(small(callbacks__evaluation__eval_every_steps=100_000)).run_dir

    train([f"resume={run}", "total_steps=256", "callbacks.evaluation.eval_every_steps=64"])

    rows = read_rows(run)
    evaluated = [int(row["env_steps"]) for row in rows if row["eval/episode_return"]]
    assert evaluated == [64, 128, 192, 256]


def test_a_run_tells_how_busy_its_workers_are_and_what_they_hold(here: Path) -> None:
    result = train([*small(n_envs=4), "vec_env=parallel", "vec_env.start_method=fork"])

    with (result.run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    assert all(0.0 < float(row["workers/busy"]) <= 1.0 for row in rows)
    if Path("/proc").exists():
        assert all(5.0 < float(row["workers/rss_mb"]) < 2000.0 for row in rows)


def test_a_straggler_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    env_fns = [partial(SlowEnv, seconds) for seconds in (0.001, 0.001, 0.01, 0.01)]
    env = ParallelEnv(env_fns, n_workers=2, start_method="fork", seed=1)
    trainer: Any = SimpleNamespace(envs=[env])
    callback = WorkerReport(straggler=1.5)
    env.reset()
    callback.on_train_start(trainer)
    for _ in range(20):  # a machine that stalls may spoil some
        for _ in range(3):
            env.step(np.zeros(4, dtype=np.int64))
        metrics = {"time/collect_seconds": 0.1}
        callback.on_iteration_end(trainer, metrics)
        assert metrics["workers/busy"] > 0.0
    env.close()

    told = capsys.readouterr().out
    assert told.count("straggler: the worker of envs 2-3 is busy") == 1


class Counter:
    """Stands for NVML, which gives percent, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.n_calls = 0

    def __call__(self, device: torch.device) -> float:
        self.n_calls += 1
        if self.error is not None:
            raise self.error
        return 10.0 * self.n_calls


def reports(device: str, nvml: Counter, *, every_seconds: float) -> list[dict[str, float]]:
    """What three iterations in a row are told."""
    callback = GpuReport(torch.device(device), every_seconds, nvml)
    rows: list[dict[str, float]] = [{}, {}, {}]
    for row in rows:
        callback.on_iteration_end(SimpleNamespace(), row)  # type: ignore[arg-type]
    return rows


def test_a_gpu_is_read_again_when_its_time_has_come_and_told_as_a_share() -> None:
    often, once = Counter(), Counter()

    told = [row["gpu/utilization"] for row in reports("cuda", often, every_seconds=0.0)]
    rare = reports("cuda", once, every_seconds=1000.0)

    assert told == [0.1, 0.2, 0.3]
    assert [sorted(row) for row in rare] == [["gpu/memory_mb", "gpu/utilization"], [], []]
    assert once.n_calls == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver")])
def test_a_utilization_that_cannot_be_read_is_left_out_and_not_asked_for_again(
    error: Exception,
) -> None:
    nvml = Counter(error)

    rows = reports("cuda", nvml, every_seconds=0.0)

    assert [sorted(row) for row in rows] == [["gpu/memory_mb"]] * 3
    assert nvml.n_calls == 1


def test_a_run_on_the_cpu_has_no_gpu_to_tell_of(here: Path) -> None:
    nvml = Counter()

    assert reports("cpu", nvml, every_seconds=0.0) == [{}, {}, {}]
    assert nvml.n_calls == 0
    with (train(small()).run_dir / "metrics.csv").open() as file:
        assert "gpu/" not in file.readline()
