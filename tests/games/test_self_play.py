"""SelfPlayEnv: an opponent from outside plays as the env's own opponent of the same strength."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from two_player_games import PULLS, TugOfWar

from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.games.self_play import SelfPlayEnv


class Recorder:
    """Plays one strength and notes what it is told."""

    def __init__(self, pull: float) -> None:
        self.pull = pull
        self.chosen: list[list[int]] = []
        self.results: list[tuple[int, int]] = []
        self.seen: list[Any] = []

    def choose(self, envs: Sequence[int]) -> None:
        self.chosen.append(list(envs))

    def act(self, envs: range, obs: Any) -> Any:
        self.seen.append(obs.copy())
        return np.full((len(obs), 1), self.pull, dtype=np.float32)

    def record(self, env: int, winner: int) -> None:
        self.results.append((env, winner))


def make(pull: float, n_envs: int = 3, **kwargs: Any) -> tuple[SelfPlayEnv, Recorder]:
    recorder = Recorder(pull)
    inner = SerialEnv([partial(TugOfWar, None)] * n_envs, seed=1, infos="final")
    return SelfPlayEnv(inner, recorder, **kwargs), recorder


def test_games_equal_those_against_the_opponent_inside_the_env() -> None:
    ours, _ = make(1.0)
    theirs = SerialEnv([partial(TugOfWar, "strong")] * 3, seed=1, infos="final")
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.observation_space == theirs.observation_space
    pairs = [env.reset(seed=5)[0] for env in (ours, theirs)]
    np.testing.assert_array_equal(*pairs)
    for t in range(60):
        actions = np.full((3, 1), 0.2 + 0.01 * t, dtype=np.float32)
        one, other = (env.step(actions) for env in (ours, theirs))
        for mine, theirs_ in zip(one[:4], other[:4], strict=True):
            np.testing.assert_array_equal(mine, theirs_)
        if "final_obs" in other[4]:
            for mine, theirs_ in zip(one[4]["final_obs"], other[4]["final_obs"], strict=True):
                np.testing.assert_array_equal(mine, theirs_)
    ours.close()
    theirs.close()


def test_opponents_see_the_mirrored_game_and_change_only_when_an_episode_starts() -> None:
    env, recorder = make(0.0, first_env=10)
    env.reset(seed=5)
    done = np.zeros(3, dtype=bool)
    for _ in range(3):
        _, _, terminated, truncated, _ = env.step(np.full((3, 1), 0.5, dtype=np.float32))
        done |= terminated | truncated
    assert not done.any()
    np.testing.assert_array_equal(recorder.seen[0][:, 0], -env.reset(seed=5)[0][:, 0])
    assert recorder.chosen == [[10, 11, 12], [10, 11, 12]]

    while not done.any():
        _, _, terminated, truncated, _ = env.step(np.ones((3, 1), dtype=np.float32))
        done = terminated | truncated
    ended = (10 + np.flatnonzero(done)).tolist()
    assert recorder.chosen[2] == ended
    assert recorder.results == [(each, 1) for each in ended]
    env.close()


def test_a_discrete_agent_plays_in_the_continuous_game() -> None:
    ours, _ = make(1.0, moves=PULLS)
    theirs, _ = make(1.0)
    assert ours.single_action_space.n == 3
    ours.reset(seed=2)
    theirs.reset(seed=2)
    actions = np.array([0, 1, 2])
    for mine, theirs_ in zip(ours.step(actions)[:4], theirs.step(PULLS[actions])[:4], strict=True):
        np.testing.assert_array_equal(mine, theirs_)
    ours.close()
    theirs.close()


def test_restored_games_continue_with_what_the_opponents_saw() -> None:
    env, recorder = make(0.4)
    env.reset(seed=3)
    for _ in range(4):
        env.step(np.full((3, 1), 0.5, dtype=np.float32))
    snapshots = env.snapshot()
    other, other_recorder = make(0.4)
    other.reset(seed=99)
    other.restore(snapshots)
    actions = np.full((3, 1), 0.7, dtype=np.float32)
    for mine, theirs in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(recorder.seen[-1], other_recorder.seen[-1])
    env.close()
    other.close()


def test_workers_give_the_same_games_and_can_be_added() -> None:
    recorder = Recorder(0.4)
    inner = ParallelEnv(
        [partial(TugOfWar, None)] * 3, seed=1, infos="final", n_workers=2, start_method="fork"
    )
    ours, (theirs, _) = SelfPlayEnv(inner, recorder), make(0.4)
    np.testing.assert_array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    actions = np.full((3, 1), 0.7, dtype=np.float32)
    for _ in range(30):
        ours.step_async(actions)
        for mine, other in zip(ours.step_wait()[:4], theirs.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(mine, other)

    obs, _ = ours.resize(5)
    assert obs.shape == (5, 2)
    assert recorder.chosen[-1] == [3, 4]
    assert ours.step(np.ones((5, 1), dtype=np.float32))[0].shape == (5, 2)
    assert ours.unwrapped.n_workers == 2
    ours.close()
    theirs.close()
    assert inner.closed


def test_an_env_for_one_player_is_refused() -> None:
    inner = SerialEnv([partial(TugOfWar, "weak")], seed=1)
    with pytest.raises(ValueError, match="not the space of two equal players"):
        SelfPlayEnv(inner, Recorder(0.0))
    inner.close()
