"""Callbacks: the schedule of evaluations and checkpoints, and the reports on workers and GPU."""

from __future__ import annotations

import csv
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Capture, read_rows, small
from tiny_envs import SlowEnv

from ml_pipeline.assembly.run import train
from ml_pipeline.callbacks.checkpoints import Checkpoints
from ml_pipeline.callbacks.evaluation import PeriodicEvaluation
from ml_pipeline.callbacks.gpu import GpuReport
from ml_pipeline.callbacks.workers import WorkerReport
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.contracts import Callback


def evaluated_steps(run: Path) -> list[int]:
    return [int(row["env_steps"]) for row in read_rows(run) if row[EVAL_RETURN]]


def test_evaluations_follow_the_schedule_and_do_not_change_training(here: Path) -> None:
    settings = small(total_steps=32 * 7)
    run = train([*settings, "callbacks.evaluation.eval_every_steps=64"]).run_dir
    never = train([*settings, "~callbacks.evaluation"]).run_dir

    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in read_rows(run)]

    assert evaluated_steps(run) == [64, 128, 192, 224]  # and after the last iteration
    assert rows == read_rows(never)


def test_resumed_run_follows_its_new_schedule(finished_run: Path) -> None:
    every = "callbacks.evaluation.eval_every_steps=64"

    train([f"resume={finished_run}", "total_steps=256", every])

    assert evaluated_steps(finished_run) == [64, 128, 192, 256]


def test_resumed_run_repeats_an_interrupted_evaluation() -> None:
    def interrupt() -> Any:
        raise Interrupted(signal.SIGINT)

    make_env: Any = interrupt
    env = SimpleNamespace(num_envs=1, unwrapped=None)
    agent = SimpleNamespace(for_playing=lambda: None)
    loop: Any = SimpleNamespace(
        env_steps=50, is_last_iteration=lambda: False, envs=[env], agent=agent
    )
    stopped = PeriodicEvaluation(make_env, VecEnvConfig(), seed=1, eval_every_steps=100)
    stopped.on_train_start(loop)
    loop.env_steps = 100
    with pytest.raises(Interrupted):
        stopped.on_iteration_end(loop, {})
    resumed = PeriodicEvaluation(make_env, VecEnvConfig(), seed=1, eval_every_steps=100)
    resumed.load_state_dict(stopped.state_dict())
    resumed.on_train_start(loop)

    loop.env_steps = 150
    with pytest.raises(Interrupted):
        resumed.on_iteration_end(loop, {})


def test_best_is_the_checkpoint_of_the_best_evaluation_also_after_a_resume(here: Path) -> None:
    settings = small(total_steps=320, callbacks__evaluation__eval_every_steps=32)
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir

    for total_steps in (320, 640):
        if total_steps > 320:
            train([f"resume={run}", f"total_steps={total_steps}"])
        rows = read_rows(run)
        returns = [float(row[EVAL_RETURN]) for row in rows]
        best, latest = (load_checkpoint(RunFolder.open(run), name) for name in ("best", "latest"))

        assert best["env_steps"] == int(rows[returns.index(max(returns))]["env_steps"])
        assert best["callbacks"]["checkpoints"]["best_return"] == max(returns)
        assert latest["env_steps"] == total_steps


def logged(callback: Checkpoints, *values: float) -> None:
    """Log ``eval/win`` in one iteration per value; iteration i ends at env step i + 1."""
    for index, value in enumerate(values):
        steps = index + 1
        loop: Any = SimpleNamespace(
            env_steps=steps, is_last_iteration=lambda: False, state_dict=partial(dict, steps=steps)
        )
        callback.on_iteration_logged(loop, {EVAL_RETURN: float(steps), "eval/win": value})


def test_best_metric_decides_which_checkpoint_is_the_best_and_a_resume_may_change_it(
    here: Path,
) -> None:
    run = RunFolder(here / "run")
    run.make()
    old = Checkpoints(run, best_metric="eval/win")

    logged(old, 5.0, 9.0, 7.0)
    assert load_checkpoint(run, "best")["steps"] == 2

    same, other = Checkpoints(run, best_metric="eval/win"), Checkpoints(run)
    for resumed in (same, other):
        resumed.load_state_dict(old.state_dict())
    assert same.best_value == 9.0
    logged(other, 0.0)  # its own metric is 1.0, less than the old maximum
    assert load_checkpoint(run, "best")["steps"] == 1


def test_best_metric_that_no_iteration_logs_is_reported(here: Path, capsys: Capture) -> None:
    loop: Any = SimpleNamespace()
    for best_metric in (EVAL_RETURN, "eval/wim"):
        Checkpoints(RunFolder(here), best_metric=best_metric).on_train_end(loop)

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("best_metric=eval/wim: no iteration logged it")


def test_run_logs_the_load_and_memory_of_its_workers(here: Path) -> None:
    result = train([*small(n_envs=4), "vec_env=parallel", "vec_env.start_method=fork"])

    with (result.run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    assert all(0.0 < float(row["workers/busy"]) <= 1.0 for row in rows)
    if Path("/proc").exists():
        assert all(5.0 < float(row["workers/rss_mb"]) < 2000.0 for row in rows)


@pytest.mark.slow
def test_straggler_is_named_once(capsys: Capture) -> None:
    env_fns = [partial(SlowEnv, seconds) for seconds in (0.001, 0.001, 0.01, 0.01)]
    env = ParallelEnv(env_fns, n_workers=2, start_method="fork", seed=1)
    loop: Any = SimpleNamespace(envs=[env])
    callback = WorkerReport(straggler=1.5)
    env.reset()
    callback.on_train_start(loop)
    for _ in range(20):  # more than needed: a busy machine may disturb some
        for _ in range(3):
            env.step(np.zeros(4, dtype=np.int64))
        metrics = {"time/collect_seconds": 0.1}
        callback.on_iteration_end(loop, metrics)
        assert metrics["workers/busy"] > 0.0
    env.close()

    printed = capsys.readouterr().out
    assert printed.count("straggler: the worker of envs 2-3 is busy") == 1


def reports(device: str, nvml: Mock, *, every_seconds: float) -> list[dict[str, float]]:
    """The metrics that three iterations in a row get; ``nvml`` replaces NVIDIA's library."""
    callback = GpuReport(torch.device(device), every_seconds, nvml)
    loop: Any = SimpleNamespace()
    rows: list[dict[str, float]] = [{}, {}, {}]
    for row in rows:
        callback.on_iteration_end(loop, row)
    return rows


def test_gpu_utilization_is_a_share_and_is_read_once_per_interval() -> None:
    often, once = Mock(side_effect=[10.0, 20.0, 30.0]), Mock(side_effect=[10.0])

    shares = [row["gpu/utilization"] for row in reports("cuda", often, every_seconds=0.0)]
    rare = reports("cuda", once, every_seconds=1000.0)

    assert shares == [0.1, 0.2, 0.3]
    assert [sorted(row) for row in rare] == [["gpu/memory_mb", "gpu/utilization"], [], []]
    assert once.call_count == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver")])
def test_unreadable_gpu_utilization_is_absent_and_not_read_again(error: Exception) -> None:
    nvml = Mock(side_effect=error)

    rows = reports("cuda", nvml, every_seconds=0.0)

    assert [sorted(row) for row in rows] == [["gpu/memory_mb"]] * 3
    assert nvml.call_count == 1


def test_run_on_the_cpu_logs_no_gpu_metrics(finished_run: Path) -> None:
    nvml = Mock()

    assert reports("cpu", nvml, every_seconds=0.0) == [{}, {}, {}]
    assert nvml.call_count == 0
    assert "gpu/" not in (finished_run / "metrics.csv").read_text()


def test_callback_with_a_misspelt_hook_is_refused_in_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "typo_parts.py").write_text(
        "from ml_pipeline.training.contracts import Callback\n"
        "class Mine(Callback):\n"
        "    def on_iteraton_end(self, loop, metrics): ...\n"
    )
    monkeypatch.syspath_prepend(str(here))

    with pytest.raises(UserError) as raised:
        train([*small(), "+callbacks.mine._target_=typo_parts.Mine"])

    assert str(raised.value) == (
        "callbacks.mine._target_=typo_parts.Mine: TypeError in typo_parts: Mine.on_iteraton_end "
        "is not a hook of Callback; did you mean on_iteration_end?"
    )
    assert not (here / "runs").exists()


def test_unknown_hook_without_a_close_name_lists_the_hooks() -> None:
    with pytest.raises(TypeError, match=r"Mine\.on_fire is not a hook .*on_train_start, on_iter"):
        type("Mine", (Callback,), {"on_fire": lambda self: None})
    type("Fine", (Callback,), {"on_cpu": True})  # not a method
