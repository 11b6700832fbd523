"""EnvPool: the same episodes as its own loop, and what training, evaluation and errors need."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_transitions import in_infos, plain, shown, transitions

from ml_pipeline import train
from ml_pipeline.analysis.check_env import check_env
from ml_pipeline.analysis.evaluate import make_evaluation_envs
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.env_pool import EnvPool
from ml_pipeline.envs.episode_stats import EpisodeStats
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.errors import UserError

envpool = pytest.importorskip("envpool", reason="make envpool installs it; .ci/run does")

N_ENVS = 3
LIVES = {"episodic_life": True, "reward_clip": True}


def ours(task_id: str, **settings: Any) -> ForeignVectorEnv:
    return ForeignVectorEnv(EnvPool(N_ENVS, task_id, **settings), task_id, N_ENVS)


def theirs(task_id: str, seed: int, **settings: Any) -> Any:
    seeds = list(range(seed, seed + N_ENVS))
    return envpool.make_gymnasium(task_id, num_envs=N_ENVS, env_seed=seeds, **settings)


def push(number: Any) -> Any:
    """Actions of HalfCheetah and Hopper."""
    return np.sin(np.outer(number, np.arange(1.0, 7.0)))


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # of EnvPool's own spaces
@pytest.mark.parametrize(
    ("task_id", "settings", "choose"),
    [
        ("CartPole-v1", {"max_episode_steps": 12}, lambda number: number % 2),
        ("Breakout-v5", LIVES, lambda number: number % 4),
        ("Breakout-v5", {"max_episode_steps": 20, "noop_max": 1}, lambda number: number % 4),
        ("HalfCheetah-v5", {"max_episode_steps": 20}, push),
        ("Hopper-v5", {"max_episode_steps": 30}, lambda number: push(number)[:, :3]),
        ("MiniGrid-Empty-Random-5x5-v0", {"max_episode_steps": 30}, lambda number: number % 3),
    ],
    ids=["CartPole", "lives", "cut games", "HalfCheetah", "Hopper", "Dict observations"],
)
def test_transitions_are_those_of_the_loop_of_envpool(
    task_id: str, settings: dict[str, Any], choose: Any
) -> None:
    pool = theirs(task_id, 3, **settings)
    expected = transitions(pool, 1000, shown, True, False, seed=None, choose=choose)

    found = transitions(ours(task_id, **settings), 1000, in_infos, False, False, choose=choose)

    for i in range(N_ENVS):
        n = len(expected[i])  # less than 1,000, because its steps after an end only reset
        assert 800 < n < 1000
        assert found[i][:n] == expected[i]
        assert sum(each[3] or each[4] for each in found[i]) > 5


def test_episodes_of_atari_are_whole_games_with_unclipped_rewards() -> None:
    # SpaceInvaders gives 5 to 200 points for a hit, and has 3 lives.
    env, pool = ours("SpaceInvaders-v5", **LIVES), theirs("SpaceInvaders-v5", 3, **LIVES)
    stats, games, lost = EpisodeStats(N_ENVS, from_infos=True), [], 0
    env.reset(seed=3)
    expected, gained, steps = [], np.zeros(N_ENVS), np.zeros(N_ENVS, int)
    pool.reset()
    is_reset = np.zeros(N_ENVS, bool)
    chosen = np.random.default_rng(1).integers(6, size=(N_ENVS, 1000))
    mine, used = np.zeros(N_ENVS, int), np.zeros(N_ENVS, int)

    for _ in range(1000):
        _, reward, terminated, truncated, infos = env.step(chosen[range(N_ENVS), mine])
        mine += 1
        games += stats.step(reward, terminated | truncated, infos)
        lost += int(terminated.sum())
    for _ in range(1000):
        _, _, terminated, truncated, infos = pool.step(chosen[range(N_ENVS), used])
        used += ~is_reset
        gained += np.where(is_reset, 0.0, infos["reward"])
        steps += ~is_reset
        for i in np.flatnonzero(infos["terminated"] & ~is_reset):
            expected.append((gained[i], steps[i]))
            gained[i], steps[i] = 0.0, 0
        is_reset = terminated | truncated

    assert trial_counts_episodes("SpaceInvaders-v5")
    assert not trial_counts_episodes("CartPole-v1")
    assert len(expected) > 3
    assert lost > 2 * len(games)
    assert max(each.episode_return for each in games) > 50
    found = [(each.episode_return, each.length) for each in games]
    assert found[: len(expected)] == expected


def trial_counts_episodes(task_id: str) -> bool:
    one: Any = factory(task_id)()
    return bool(one.counts_own_episodes)


def factory(task_id: str, **settings: Any) -> EnvFactory:
    kwargs = {"task_id": task_id, **settings}
    return EnvFactory(None, "ml_pipeline.envs.env_pool.EnvPool", kwargs)


def test_an_evaluated_game_has_all_its_lives() -> None:
    envs = make_evaluation_envs(factory("Breakout-v5", **LIVES), VecEnvConfig(), n_envs=1)
    obs, _ = envs.reset(seed=1, options={"stride": 1, "end": 2, "max_steps": 1000})
    final: Any = {}
    n_lost = 0

    while "evaluated" not in final:
        obs, _, terminated, _, infos = envs.step(np.zeros(1, int))
        n_lost += int(terminated[0])
        final = infos.get("final_info", {})

    assert n_lost == 5
    assert obs.shape == (1, 4, 84, 84)
    assert final["evaluated"]["return"][0] == final["episode"]["r"][0] == 0.0
    assert final["evaluated"]["length"][0] > 60


def test_the_seed_decides_each_env() -> None:
    wide, other = EnvPool(4, "CartPole-v1"), EnvPool(2, "CartPole-v1")
    first, _ = wide.reset(seed=7)
    same, _ = other.reset(seed=9)

    assert plain(first[2:]) == plain(same)  # env i gets seed + i
    assert plain(wide.reset(seed=7)[0]) == plain(first)
    assert plain(wide.reset()[0]) != plain(first)
    assert plain(wide.reset(seed=2**31)[0]) == plain(wide.reset(seed=0)[0])
    assert len(np.unique(first, axis=0)) == 4


def test_bounds_that_do_not_exist_are_infinite() -> None:
    space = EnvPool(1, "CheetahRun-v1").single_observation_space

    assert np.isinf(space["velocity"].low).all()
    assert np.isinf(space["velocity"].high).all()


def test_ppo_trains_evaluates_and_resumes(here: Path, capsys: Any) -> None:
    words = ["env=envpool", "callbacks.evaluation.n_episodes=2", "logger=none"]
    agent = {"n_steps": 32}

    first = train(words, n_envs=4, total_steps=256, agent=agent)
    train(resume=str(first.run_dir), total_steps=512)

    said = capsys.readouterr().out
    assert first.run_dir.parent.name == "EnvPool-CartPole-v1"
    assert "EnvPool-CartPole-v1: 4 envs in one EnvPool, cpu" in said
    assert "its episodes cannot be saved and its dead envs are not restarted" in said
    assert "resumed at env step 256 with new episodes" in said
    with (first.run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["eval/episode_return"] for row in rows)


def test_check_env_finds_no_fault() -> None:
    for task_id in ("CartPole-v1", "Pong-v5", "HalfCheetah-v5"):
        env = factory(task_id)

        found = check_env(env, task_id, VecEnvConfig(), mask_key="action_mask", seconds=0.05)

        assert found.faults == []
        assert len(found.remarks) == 1
        assert "a resumed run starts new episodes" in found.remarks[0]


def test_an_env_is_rendered() -> None:
    env = factory("Pong-v5").rendering("rgb_array")()
    env.reset(seed=1)

    frame: Any = env.render()

    assert frame.ndim == 3
    assert frame.shape[2] == 3
    assert frame.std() > 0


@pytest.mark.parametrize(
    ("task_id", "settings", "error"),
    [
        ("CartPol-v1", {}, "task_id=CartPol-v1 is not a task of EnvPool; did you mean CartPole-v1"),
        ("Nonsense", {}, r"is not a task of EnvPool; see envpool.list_all_envs\(\)"),
        ("TicTacToe-v1", {}, "TicTacToe-v1: this task has 2 players, which is not supported"),
        ("Pong-v5", {"reward_clipp": True}, "reward_clipp is unknown; did you mean reward_clip?"),
        ("Pong-v5", {"stack_num": "four"}, "stack_num=four: must be like its default, 4; got a"),
        ("Pong-v5", {"seed": 3}, "kwargs.seed: the seed of the run sets it; remove the key"),
    ],
)
def test_mistakes_are_named_in_one_line(task_id: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error) as caught:
        factory(task_id, **settings)()

    assert "\n" not in str(caught.value)
