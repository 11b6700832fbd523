"""Evaluation: seeds, batches of envs, lost lives, and evaluation during training."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Capture, read_rows, small, summary_of
from tiny_envs import CountingEnv, LivesEnv, NoisyEnv

from ml_pipeline import PPO
from ml_pipeline.__main__ import main
from ml_pipeline.analysis.evaluate import (
    Evaluator,
    evaluate,
    evaluate_batch,
    make_evaluation_envs,
)
from ml_pipeline.assembly.compose import ConfigError
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import WorkerError
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import stream_seed
from ml_pipeline.study.best import deploy_run


class Still:
    """A policy that always does the same."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def act_batch(self, obs: Any, *_: Any, **__: Any) -> Any:
        n_envs = len(obs["vector"] if isinstance(obs, dict) else obs)
        return np.stack([np.asarray(self.action)] * n_envs)

    def new_memory(self, n_envs: int) -> None: ...

    def mask_of(self, infos: Any) -> None: ...


def test_a_batch_of_envs_plays_the_same_episodes_as_one_env() -> None:
    policy: Any = Still(np.zeros(2, np.float32))
    how: Any = {"n_episodes": 7, "seed": 5, "deterministic": True}
    alone = evaluate(policy, NoisyEnv(), **how)

    for n_envs in (1, 3, 7, 9):
        with closing(make_evaluation_envs(NoisyEnv, VecEnvConfig(), n_envs=n_envs)) as envs:
            assert evaluate_batch(policy, envs, **how) == alone
            assert evaluate_batch(policy, envs, **how) == alone  # with new envs, same seeds
    assert len({episode.episode_return for episode in alone.episodes}) == 7


def test_episodes_are_equal_only_if_observations_and_rewards_are() -> None:
    class Slippery(CountingEnv):
        """One seed of eight has another observation, and the same return."""

        def _observe(self) -> Any:
            return super()._observe() + float(self.np_random_seed == 7 and self._step == 2)

    policy: Any = Still(0)
    found = {}
    for make_env in (CountingEnv, Slippery):
        for n_episodes in (1, 7, 8):
            result = evaluate(policy, make_env(), n_episodes=n_episodes, seed=0, deterministic=True)
            found[make_env.__name__, n_episodes] = result.are_equal

    assert {name for name, is_equal in found.items() if is_equal} == {
        ("CountingEnv", 7),
        ("CountingEnv", 8),
        ("Slippery", 7),
    }


def test_evaluations_of_equal_episodes_play_two_until_these_differ() -> None:
    """Its reward depends on the seed after the action 1 only."""
    played: list[int] = []

    class Calm(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            played.append(0)
            return super().reset(seed=seed)

        def step(self, action: Any) -> Any:
            obs, reward, *ends = super().step(action)
            return obs, reward + float(action * self.np_random.random()), *ends

    evaluator = Evaluator(Calm, VecEnvConfig(), n_episodes=5, seed=0)
    counts = []
    for action in (0, 0, 1, 1, 0):
        played.clear()
        policy: Any = Still(action)
        result = evaluator.evaluate(policy, most_envs=1, in_workers=False, episodes_end=True)
        counts.append((len(played), len(result.episodes)))
    evaluator.close()

    assert counts == [(5, 5), (2, 2), (7, 5), (5, 5), (5, 5)]


@pytest.mark.parametrize(("more", "n_played"), [([], 20), (["--deterministic"], 8)])
def test_evaluate_leaves_out_episodes_that_equal_the_first_eight(
    more: list[str], n_played: int, here: Path, capsys: Capture
) -> None:
    run = train([*small(), "env.target=tiny_envs.CountingEnv"]).run_dir
    capsys.readouterr()

    assert main(["evaluate", str(run), *more]) == 0

    printed = capsys.readouterr().out
    assert f" {n_played} episodes from seed " in printed
    line = "12 more episodes left out: the first 8 are equal step by step, whatever their seed"
    assert (line in printed) == (n_played == 8)


def test_evaluate_plays_one_episode_of_an_env_that_declares_to_be_deterministic(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (here / "certain_game.py").write_text(
        "from tiny_envs import CountingEnv\n"
        "class Certain(CountingEnv):\n"
        "    is_deterministic = True\n"
    )
    monkeypatch.syspath_prepend(str(here))
    run = train([*small(), "env.target=certain_game.Certain"]).run_dir
    capsys.readouterr()

    assert main(["evaluate", str(run), "--deterministic"]) == 0

    assert " 1 episode from seed " in capsys.readouterr().out


class Certain(CountingEnv):
    is_deterministic = True


@pytest.mark.parametrize(("env", "n_played"), [(CountingEnv, 8), (Certain, 1), ("CartPole-v1", 12)])
def test_model_and_deployed_policy_leave_out_episodes_that_repeat_the_first(
    env: Any, n_played: int, here: Path, capsys: Capture
) -> None:
    settings = {"vec_env": "serial", "device": "cpu", "logger": "none"}
    evaluations = {"evaluation": {"n_episodes": 2}, "checkpoints": {"final_episodes": 2}}
    model = PPO(env, n_envs=2, n_steps=16, callbacks=evaluations, **settings).learn(64)
    capsys.readouterr()
    assert model.run_dir is not None

    played = model.evaluate(12)
    in_samples = model.evaluate(12, deterministic=False)
    deploy_run(RunFolder(model.run_dir), here / "live", {"trial": 1}, n_episodes=12, seed=1)

    assert [len(each.episodes) for each in (played, in_samples)] == [n_played, 12]
    assert json.loads((here / "live" / "deployed.json").read_text())["n_episodes"] == n_played
    lines = {8: "4 more episodes left out", 1: "plays one episode, because the env declares"}
    printed = capsys.readouterr().out
    for number, line in lines.items():
        assert printed.count(line) == 2 * (number == n_played)


def test_workers_play_the_same_episodes_as_this_process() -> None:
    policy: Any = Still(np.zeros(2, np.float32))
    how: Any = {"n_episodes": 5, "seed": 5, "deterministic": True}
    settings = VecEnvConfig(n_workers=2, start_method="fork")

    with closing(make_evaluation_envs(NoisyEnv, settings, n_envs=4, in_workers=True)) as envs:
        assert evaluate_batch(policy, envs, **how) == evaluate(policy, NoisyEnv(), **how)


def test_a_worker_of_an_evaluation_has_no_torch() -> None:
    make_env = EnvFactory(None, target="faulty_envs.WorkerModules")
    settings = VecEnvConfig(n_workers=1, start_method="spawn")

    with closing(make_evaluation_envs(make_env, settings, n_envs=1, in_workers=True)) as envs:
        assert envs.call("has_module", "torch") == (False,)


def test_an_env_that_is_done_is_not_stepped_while_the_others_play() -> None:
    steps: list[int] = []

    class Long(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.length = 2 if seed == 0 else 20
            return super().reset(seed=seed)

        def step(self, action: Any) -> Any:
            steps.append(self.length)
            return super().step(action)

    policy: Any = Still(0)
    with closing(make_evaluation_envs(Long, VecEnvConfig(), n_envs=2)) as envs:
        result = evaluate_batch(policy, envs, n_episodes=2, seed=0, deterministic=True)

    assert [episode.length for episode in result.episodes] == [2, 20]
    assert (steps.count(2), steps.count(20)) == (2, 20)


def test_an_episode_lasts_until_the_last_life() -> None:
    policy: Any = Still(0)
    make_env = partial(LivesEnv.wrapped, 3)

    with closing(make_evaluation_envs(make_env, VecEnvConfig(), n_envs=2)) as envs:
        result = evaluate_batch(policy, envs, n_episodes=3, seed=0, deterministic=True)

    # 3 lives of 2 steps, rewards before the wrapper, and the number in the last info
    assert result.episodes == [Episode(6.0, 6, 1, {"life": 3.0})] * 3


def faulty(fault: str, *more: str) -> list[str]:
    """An env that fails in evaluations only: no training env has their seed."""
    culprit = stream_seed(1, "evaluation")
    kwargs = [f"+env.kwargs.fault={fault}", f"+env.kwargs.culprit={culprit}"]
    workers = ["vec_env=parallel", "vec_env.n_workers=1", "vec_env.step_timeout_seconds=5"]
    workers += ["vec_env.start_method=fork"]
    target = "env.target=tiny_envs.FaultyEnv"
    return [*small(), "seed=1", target, *kwargs, *workers, *more]


@pytest.mark.usefixtures("leaves_no_child")
def test_a_crash_in_an_evaluation_ends_the_run_with_a_complete_record(here: Path) -> None:
    with pytest.raises(WorkerError, match=r"evaluation: the worker of envs? 0.* exit code 7"):
        train(faulty("exit"))

    (run,) = (path.parent for path in here.glob("runs/*/*/summary.json"))
    assert summary_of(run)["status"] == "failed"
    assert (run / "checkpoints" / "latest.pt").is_file()


@pytest.mark.usefixtures("leaves_no_child")
def test_a_crash_in_an_evaluation_leaves_it_out_if_workers_are_restarted(
    here: Path, capsys: Capture
) -> None:
    result = train(faulty("exit", "vec_env.on_worker_death=restart"))

    printed = capsys.readouterr().out
    assert "starting its workers again" in printed
    assert "evaluation at env step 64 left out: " in printed
    assert (result.env_steps, summary_of(result.run_dir)["status"]) == (64, "finished")
    assert not any(row.get(EVAL_RETURN) for row in read_rows(result.run_dir))


def test_episodes_that_never_end_are_cut_early_and_reported_once(
    here: Path, capsys: Capture
) -> None:
    every = "callbacks.evaluation.eval_every_steps=32"
    run = train([*small(), "env.target=tiny_envs.EndlessEnv", every]).run_dir

    assert [row["eval/episode_length"] for row in read_rows(run)] == ["1000.0", "1000.0"]
    assert capsys.readouterr().out.count("episodes did not end and were cut at 1,000 steps") == 1


def test_eval_env_is_used_by_evaluations_and_by_evaluate(here: Path) -> None:
    longer = ["env.target=tiny_envs.CountingEnv", "+eval_env.kwargs.length=7"]
    limit = "{_target_: gymnasium.wrappers.TimeLimit, max_episode_steps: 2}"
    wrapped = [f"+env.wrappers.limit={limit}", "+eval_env.wrappers.limit=null"]
    run = train([*small(), *longer, *wrapped]).run_dir

    (row,) = (row for row in read_rows(run) if row[EVAL_RETURN])
    assert (row["rollout/episode_length"], row["eval/episode_length"]) == ("2.0", "7.0")
    assert load_agent(run).env.unwrapped.length == 7  # type: ignore[attr-defined]


def test_error_of_the_eval_env_names_it(here: Path) -> None:
    target = "env.target=tiny_envs.CountingEnv"
    with pytest.raises(ConfigError, match=r"^eval_env: env.kwargs.lenght is unknown; CountingEnv"):
        train([*small(), target, "+eval_env.kwargs.lenght=7"])


def test_eval_env_with_other_spaces_is_refused(here: Path) -> None:
    with pytest.raises(Exception, match=r"eval_env has the observation_space .* but env has"):
        train([*small(), "eval_env.id=Acrobot-v1"])
    assert list(here.iterdir()) == []
