"""Snapshots: a restored env behaves like the original, or the trial says why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tiny_envs import CountingEnv, ForbiddingEnv, LivesEnv, MixedEnv, NoisyEnv, Unpicklable
from vec_envs import WAYS, flat

from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot, why_no_snapshot
from ml_pipeline.envs.vec_env import SerialEnv, WorkerError


class OwnState(NoisyEnv):
    """Cannot be pickled, but has get_state and set_state, without its random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = (i for i in ())
        self.count = 0

    def get_state(self) -> Any:
        return self.count

    def set_state(self, state: Any) -> None:
        self.count = state

    def step(self, action: Any) -> Any:
        self.count += 1
        obs, reward, *rest = super().step(action)
        return obs, reward + self.count, *rest


class UnpickledAsNew(CountingEnv, gym.utils.EzPickle):
    """Like many envs of Gymnasium: its pickle contains only its arguments."""

    def __init__(self) -> None:
        CountingEnv.__init__(self, length=50)
        gym.utils.EzPickle.__init__(self)


class ForgetsItsStep(CountingEnv):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": 0}


class ObservesNan(CountingEnv):
    def _observe(self) -> Any:
        return np.full(2, np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    "make_env",
    [
        partial(gym.make, "CartPole-v1"),
        partial(gym.make, "Acrobot-v1"),
        partial(gym.make, "Pendulum-v1"),
        partial(gym.make, "MountainCarContinuous-v0"),
        NoisyEnv,
        MixedEnv,
        OwnState,
        partial(ForbiddingEnv, "info"),
        partial(ForbiddingEnv, "obs"),
        partial(LivesEnv.wrapped, lives=3),
        ObservesNan,
    ],
)
def test_these_envs_can_continue_an_episode(make_env: Any) -> None:
    assert why_no_snapshot(make_env(), make_env) is None


@pytest.mark.parametrize(
    ("make_env", "words"),
    [
        (UnpickledAsNew, "UnpickledAsNew is an EzPickle, which is unpickled as a new env"),
        (partial(ForgetsItsStep, 50), "a restored env behaves differently"),
        (Unpicklable, "TypeError: cannot pickle 'generator' object"),
    ],
)
def test_an_env_that_cannot_continue_is_detected(make_env: Any, words: str) -> None:
    assert words in str(why_no_snapshot(make_env(), make_env))


def test_wrappers_keep_their_state_around_an_env_with_get_state() -> None:
    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(OwnState(), 5)

    env = make()
    env.reset(seed=1)
    for _ in range(3):
        env.step(np.zeros(2))

    restored, obs = restore_snapshot(make(), take_snapshot(env, "last observation"))

    assert obs == "last observation"
    assert restored.get_wrapper_attr("_elapsed_steps") == 3
    assert restored.unwrapped.count == 3


def play(env: Any, n_steps: int) -> list[Any]:
    return [flat(list(env.step(np.zeros((env.num_envs, 2))))) for _ in range(n_steps)]


@pytest.mark.parametrize(("first", "second"), [("serial", "parallel"), ("shared", "serial")])
def test_a_vector_env_continues_in_another_one(first: str, second: str) -> None:
    ours, theirs = (WAYS[way]([OwnState] * 3, seed=1) for way in (first, second))
    ours.reset()
    play(ours, 7)

    theirs.restore(ours.snapshot())

    assert play(ours, 20) == play(theirs, 20)
    ours.close()
    theirs.close()


def test_an_error_names_the_env_that_cannot_be_saved_or_restored() -> None:
    env = SerialEnv([CountingEnv, Unpicklable], seed=3)
    env.reset()

    with pytest.raises(WorkerError, match=r"env 1 \(seed 4\) raised:[\s\S]*cannot pickle"):
        env.snapshot()
    with pytest.raises(WorkerError, match=r"env 0 \(seed 3\) raised:[\s\S]*"):
        env.restore([b"no pickle", b""])
    with pytest.raises(ValueError, match="1 snapshots given for 2 envs"):
        env.restore([b""])


@pytest.mark.parametrize(
    ("package", "name"),
    [("mujoco", "HalfCheetah-v5"), ("mujoco", "Hopper-v5"), ("Box2D", "LunarLander-v3")],
)
def test_mujoco_can_continue_an_episode_and_box2d_cannot(package: str, name: str) -> None:
    pytest.importorskip(package, reason=f"needs make {package.lower()}")
    make_env = partial(gym.make, name)

    assert (why_no_snapshot(make_env(), make_env) is None) == (package == "mujoco")
