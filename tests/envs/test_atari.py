"""Atari: observations of the policy, and returns of the whole game."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.wrappers.atari import Atari, QuickFrames

pytest.importorskip("ale_py", reason="needs the extra: pip install -e '.[atari]'")
pytest.importorskip("cv2", reason="needs the extra: pip install -e '.[atari]'")


def factory(game: str) -> EnvFactory:
    wrappers = {"atari": {"_target_": "ml_pipeline.envs.wrappers.atari.Atari"}}
    return EnvFactory(f"ale_py:{game}NoFrameskip-v4", wrappers=wrappers)


def played(env: gym.Env[Any, Any], n_steps: int) -> list[tuple[Any, float, bool, dict[str, Any]]]:
    env.reset(seed=3)
    env.action_space.seed(3)
    steps = []
    for _ in range(n_steps):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        steps.append((obs, float(reward), terminated or truncated, info))
        if terminated or truncated:
            env.reset()
    return steps


@pytest.mark.parametrize(
    ("game", "frame_skip", "n_frames"),
    [("Pong", 1, 100), ("Freeway", 2, 200), ("Pong", 4, 400), ("Breakout", 4, 10_000)],
)
@pytest.mark.slow
def test_frames_from_the_emulator_equal_those_of_gymnasiums_wrapper(
    game: str, frame_skip: int, n_frames: int
) -> None:
    def made() -> gym.Env[Any, Any]:
        # Sticky actions use the emulator's random generator.
        return gym.make(
            f"ale_py:{game}NoFrameskip-v4",
            repeat_action_probability=0.25,
            max_num_frames_per_episode=n_frames,
        )

    kinds = QuickFrames, wrappers.AtariPreprocessing
    ours, theirs = (each(made(), noop_max=9, frame_skip=frame_skip) for each in kinds)
    assert QuickFrames.suits(made())
    ends = set()
    for seed, n_steps in [(0, 250), (1, 10)]:
        assert np.array_equal(ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0])
        ours.action_space.seed(seed)
        for action in (ours.action_space.sample() for _ in range(n_steps)):
            our, their = ours.step(action), theirs.step(action)
            assert np.array_equal(our[0], their[0])
            assert our[1:] == their[1:]
            if our[2] or our[3]:
                ends.add("terminated" if our[2] else "truncated")
                assert np.array_equal(ours.reset()[0], theirs.reset()[0])
    assert ends == {"terminated" if game == "Breakout" else "truncated"}


def test_quick_frames_refuse_an_env_that_skips_frames_or_changes_a_step() -> None:
    import ale_py

    class Costly(ale_py.AtariEnv):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, reward - 1.0, *rest

    assert not QuickFrames.suits(gym.make("ALE/Pong-v5"))
    assert not QuickFrames.suits(gym.make("ale_py:Pong-v4"))
    assert not QuickFrames.suits(Costly("pong", frameskip=1))


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(gym.error.ResetNeeded):
        factory("Pong")().step(0)


def test_a_time_limit_below_the_wrapper_still_applies() -> None:
    limited = gym.make("ale_py:PongNoFrameskip-v4", max_episode_steps=40)

    assert not QuickFrames.suits(limited)
    env = Atari(limited, noop_max=0)
    env.reset(seed=1)
    assert [env.step(0)[3] for _ in range(12)].index(True) == 8  # FIRE was the first of nine steps


def test_the_policy_observes_four_grey_frames_and_signs_of_rewards() -> None:
    env = factory("Breakout")()

    steps = played(env, 400)

    assert env.observation_space.shape == (4, 84, 84)
    assert {obs.dtype for obs, *_ in steps} == {np.dtype(np.uint8)}
    assert {reward for _, reward, *_ in steps} <= {-1.0, 0.0, 1.0}
    first, second = steps[10][0], steps[11][0]
    assert np.array_equal(first[1:], second[:-1])  # the stack advances by one frame


@pytest.mark.slow
def test_an_episode_is_a_life_and_its_return_that_of_the_whole_game() -> None:
    steps = played(factory("Breakout")(), 1500)

    ends = [info for _, _, done, info in steps if done]
    games = [info["episode"] for info in ends if "episode" in info]
    assert len(games) >= 2
    assert len(ends) >= 4 * len(games)  # five lives a game
    seen = [reward for _, reward, _, _ in steps]
    assert sum(game["r"] for game in games) <= sum(seen) + 30  # no game counts twice


def test_pong_can_continue_an_episode() -> None:
    make_env = factory("Pong")

    assert why_no_snapshot(make_env(), make_env) is None
