"""Callbacks: the schedule of evaluations and checkpoints, and the reports on workers and GPU."""

from __future__ import annotations

import csv
import io
import math
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Capture, only_run, read_rows, small
from gymnasium import spaces
from tiny_envs import SlowEnv

from ml_pipeline.analysis import evaluate as evaluation
from ml_pipeline.assembly.run import train
from ml_pipeline.callbacks.checkpoints import Checkpoints
from ml_pipeline.callbacks.evaluation import PeriodicEvaluation
from ml_pipeline.callbacks.gpu import GpuReport
from ml_pipeline.callbacks.workers import WorkerReport
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.checkpoint import finalist_steps, load_checkpoint
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


def test_best_is_the_newest_of_the_best_evaluations_also_after_a_resume(here: Path) -> None:
    settings = small(
        total_steps=320,
        callbacks__evaluation__eval_every_steps=32,
        callbacks__checkpoints__finalists=1,
    )
    run = train([*settings, "agent.learning_rate=0.05"]).run_dir

    for total_steps in (320, 640):
        if total_steps > 320:
            train([f"resume={run}", f"total_steps={total_steps}"])
        rows = read_rows(run)
        returns = [float(row[EVAL_RETURN]) for row in rows]
        best, latest = (load_checkpoint(RunFolder.open(run), name) for name in ("best", "latest"))

        newest = max(index for index, each in enumerate(returns) if each == max(returns))
        assert best["env_steps"] == int(rows[newest]["env_steps"])
        assert best["callbacks"]["checkpoints"]["best_return"] == max(returns)
        assert latest["env_steps"] == total_steps


def logged(callback: Checkpoints, *values: float, first: int = 1) -> None:
    """Log ``eval/win`` in one iteration per value, at the env steps from ``first`` on."""
    for steps, value in enumerate(values, start=first):
        state = partial(dict, steps=steps, env_steps=steps)
        loop: Any = SimpleNamespace(
            env_steps=steps, is_last_iteration=lambda: False, state_dict=state
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


def test_newest_checkpoint_wins_a_tie_and_nan_never_wins(here: Path) -> None:
    for finalists in (1, 3):
        run = RunFolder(here / str(finalists))
        run.make()
        logged(
            Checkpoints(run, finalists=finalists, best_metric="eval/win"), 1.0, 9.0, 9.0, math.nan
        )

        assert load_checkpoint(run, "best")["steps"] == 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_is_greedy_or_samples(deterministic: bool) -> None:
    played: list[bool] = []

    class Noting(Constant):
        def act_batch(self, obs: Any, deterministic: bool, **options: Any) -> Any:
            played.append(deterministic)
            return super().act_batch(obs)

    agent = SimpleNamespace(for_playing=lambda: Noting(1))
    env = SimpleNamespace(num_envs=2, unwrapped=None)
    loop: Any = SimpleNamespace(
        env_steps=10_000, is_last_iteration=lambda: True, envs=[env], agent=agent
    )
    sampling = PeriodicEvaluation(
        Game,  # type: ignore[arg-type]  # a class makes an env too
        VecEnvConfig(),
        seed=1,
        deterministic=deterministic,
    )
    sampling.on_train_start(loop)
    sampling.on_iteration_end(loop, {})
    sampling.play_final(Noting(1), loop, n_episodes=2, episodes_end=True)  # type: ignore[arg-type]
    sampling.close()

    assert set(played) == {deterministic}


@pytest.mark.parametrize(
    ("more", "n_episodes"),
    [
        ("", 1),
        ("callbacks.evaluation.deterministic=false", 4),
        ("+env.wrappers.mine._target_=gymnasium.Wrapper", 4),  # it may draw random numbers
        ("env.target=tiny_envs.CountingEnv", 4),  # its class declares nothing
    ],
)
def test_deterministic_env_plays_one_greedy_episode(
    more: str, n_episodes: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (here / "certain_envs.py").write_text(
        "from tiny_envs import CountingEnv\n"
        "class Certain(CountingEnv):\n"
        "    is_deterministic = True\n"
    )
    monkeypatch.syspath_prepend(str(here))
    played: list[int] = []
    evaluate_batch = evaluation.evaluate_batch

    def counted(*words: Any, **options: Any) -> Any:
        result = evaluate_batch(*words, **options)
        played.append(len(result.episodes))
        return result

    monkeypatch.setattr(evaluation, "evaluate_batch", counted)

    settings = small(callbacks__evaluation__n_episodes=4)
    train([*settings, "env.target=certain_envs.Certain", *more.split()])

    assert played == [n_episodes]
    assert (n_episodes == 1) == ("plays one episode, because" in capsys.readouterr().out)


def test_evaluations_of_equal_episodes_are_reported_once_and_remembered_by_a_resume(
    here: Path, capsys: Capture
) -> None:
    settings = small(callbacks__evaluation__n_episodes=4, agent__n_steps=8)
    run = train(
        [*settings, "env.target=tiny_envs.CountingEnv", "callbacks.evaluation.eval_every_steps=16"]
    ).run_dir

    line = "evaluation: its 4 episodes are equal step by step; from now on it plays two"
    assert capsys.readouterr().out.count(line) == 1
    train([f"resume={run}", "total_steps=96", "logger=none"])
    assert line not in capsys.readouterr().out
    assert {row["eval/episode_return"] for row in read_rows(run)} == {"60.0"}


class Game(gym.Env[Any, Any]):
    """One step: its return is the action, from 0 to 1000."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(1001)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=options.get("seed"))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float(action), True, False, {}


class Constant:
    """Always takes the same action."""

    def __init__(self, action: int) -> None:
        self.action = action

    def new_memory(self, n_envs: int) -> None: ...

    def mask_of(self, infos: Any) -> None: ...

    def act_batch(self, obs: Any, *how: Any, **options: Any) -> Any:
        return np.full(len(obs), self.action)


# Values of the evaluations of a run, what new episodes show, and the best by each of both.
FINALS = [
    ([9.0, 8.0, 7.0], {1: 5, 2: 6, 3: 4}, 1, 2),
    ([9.0, 9.0, 9.0, 9.0], {1: 9, 2: 5, 3: 9, 4: 9}, 4, 4),  # the oldest is left out
    ([1.0, 9.0, 2.0, 8.0, 3.0], {2: 0, 4: 0, 5: 7}, 2, 5),
    ([9.0], {}, 1, 1),  # a single one plays nothing
]


def finished(callback: Checkpoints, env: type[gym.Env[Any, Any]] = Game) -> None:
    """End the run of a callback."""
    vec = SimpleNamespace(num_envs=2, unwrapped=None)
    played = PeriodicEvaluation(env, VecEnvConfig(), seed=1)  # type: ignore[arg-type]
    loop: Any = SimpleNamespace(envs=[vec], callbacks={"evaluation": played})
    callback.on_train_end(loop)
    played.close()


def named(run: RunFolder) -> list[str]:
    return sorted(path.stem for path in run.checkpoints.iterdir())


@pytest.mark.parametrize(("values", "truth", "first", "winner"), FINALS)
def test_end_of_a_run_picks_the_best_by_new_episodes(
    values: list[float],
    truth: dict[int, int],
    first: int,
    winner: int,
    here: Path,
    capsys: Capture,
) -> None:
    run = RunFolder(here / "run")
    run.make()

    def load_policy(name: str) -> Any:
        return Constant(truth[load_checkpoint(run, name)["steps"]])

    callback = Checkpoints(run, load_policy=load_policy)
    for steps, value in enumerate(values, start=1):
        loop: Any = SimpleNamespace(
            env_steps=steps, is_last_iteration=lambda: False, state_dict=partial(dict, steps=steps)
        )
        callback.on_iteration_logged(loop, {EVAL_RETURN: value})
    assert load_checkpoint(run, "best")["steps"] == first
    finished(callback)

    assert load_checkpoint(run, "best")["steps"] == winner
    assert named(run) == ["best"]
    said = capsys.readouterr().out
    assert f"best.pt: env step {winner} ({truth.get(winner)}.0), by eval" in said or not truth


def test_finalists_survive_a_kill_after_the_last_save_and_a_longer_run(here: Path) -> None:
    run = RunFolder(here / "run")
    run.make()
    first = Checkpoints(run, best_metric="eval/win")
    logged(first, 6.0, 5.0, 4.0)
    saved = first.state_dict()
    logged(first, 7.0, 8.0, 9.0, first=4)  # not in a saved state: the process was killed

    resumed = Checkpoints(run, best_metric="eval/win")
    resumed.load_state_dict(saved)
    assert [each.env_steps for each in resumed.finalists] == [1, 2, 3]
    logged(resumed, 4.5, first=4)
    finished(resumed)  # without load_policy: best.pt remains as it is
    assert named(run) == ["best"]

    longer = Checkpoints(run, best_metric="eval/win")
    longer.load_state_dict({**saved, "finalists": [[6.0, 6], [5.0, 2]]})
    assert [each.env_steps for each in longer.finalists] == [6]  # best.pt is of step 6
    assert longer.best_value == 6.0


class Broken(Game):
    def step(self, action: Any) -> Any:
        raise ValueError("the table broke")


def test_failing_final_leaves_best_and_does_not_fail_the_run(here: Path, capsys: Capture) -> None:
    run = RunFolder(here / "run")
    run.make()
    callback = Checkpoints(run, best_metric="eval/win", load_policy=lambda name: Constant(1))  # type: ignore[arg-type, return-value]
    logged(callback, 2.0, 1.0)

    finished(callback, Broken)

    assert load_checkpoint(run, "best")["steps"] == 1
    said = capsys.readouterr().out
    assert "best.pt: the finalists could not play: env 0 (seed " in said
    assert said.endswith("raised: ValueError: the table broke\n")


def test_signal_during_the_final_ends_a_complete_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def stopped(*words: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(PeriodicEvaluation, "play_final", stopped)

    with pytest.raises(Interrupted):
        train(small(total_steps=160, callbacks__evaluation__eval_every_steps=32))

    run = RunFolder.open(only_run(here))
    assert load_checkpoint(run, "latest")["env_steps"] == 160
    assert load_checkpoint(run, "best")["env_steps"] in finalist_steps(run)
    assert run.read_summary()["status"] == "interrupted"
    assert "stopped by SIGTERM at env step 160 of 160" in capsys.readouterr().out
    train([f"resume={run.path}", "total_steps=320", "callbacks.checkpoints.finalists=1"])
    assert finalist_steps(run) == []


def test_runs_with_and_without_a_final_differ_only_in_best(here: Path) -> None:
    settings = small(total_steps=160, callbacks__evaluation__eval_every_steps=32)
    states: list[list[bytes]] = []
    for finalists in (1, 3):
        run = train([*settings, f"callbacks.checkpoints.finalists={finalists}"]).run_dir
        assert (run / "checkpoints" / "best.pt").is_file()
        assert not list(run.glob("checkpoints/best_*"))
        state, contents = load_checkpoint(RunFolder.open(run), "latest"), []
        for key in ("agent", "collector", "global_generators"):
            torch.save(state[key], content := io.BytesIO())
            contents.append(content.getvalue())
        states.append(contents)

    assert states[0] == states[1]


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


def test_run_logs_how_often_workers_were_replaced(here: Path) -> None:
    parallel = "vec_env=parallel", "vec_env.start_method=fork", "vec_env.on_worker_death=restart"
    kill = "+callbacks.kill._target_=own_parts.KillAWorkerAt"

    with pytest.warns(RuntimeWarning, match="restart 1 of 10"):
        run = train([*small(total_steps=160), *parallel, kill]).run_dir

    with (run / "metrics.csv").open(newline="") as file:
        restarts = [float(row["workers/restarts"]) for row in csv.DictReader(file)]
    assert restarts == [0.0, 0.0, 0.0, 1.0, 1.0]


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


def test_hook_of_stable_baselines_is_refused_with_the_hook_to_write() -> None:
    with pytest.raises(TypeError, match=r"Mine\._on_step is not a hook .* mean on_iteration_end"):
        type("Mine", (Callback,), {"_on_step": lambda self: True})
    type("Mine", (Callback,), {"_on_fire": lambda self: True})  # a method of its own


def test_unknown_hook_without_a_close_name_lists_the_hooks() -> None:
    with pytest.raises(TypeError, match=r"Mine\.on_fire is not a hook .*on_train_start, on_iter"):
        type("Mine", (Callback,), {"on_fire": lambda self: None})
    type("Fine", (Callback,), {"on_cpu": True})  # not a method
