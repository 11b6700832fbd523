"""Atari as the published agents play it, by one wrapper: conf/env/pong.yaml and breakout.yaml.

No-op starts, four frames a step with the larger of the last two pixels, 84 x 84 grey, a stack of
four, an episode per life, fire to begin, and the sign of the reward. Returns are still those of
the game: they are counted below all this, and told in the infos.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers


class Atari(gym.Wrapper[Any, Any, Any, Any]):
    """All of it around an env without a frame skip of its own, such as PongNoFrameskip-v4."""

    counts_own_episodes = True

    def __init__(
        self,
        env: gym.Env[Any, Any],
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        stack: int = 4,
        episodic_life: bool = True,
        clip_reward: bool = True,
    ) -> None:
        frames = QuickFrames if QuickFrames.suits(env) else wrappers.AtariPreprocessing
        env = frames(env, noop_max=noop_max, frame_skip=frame_skip, screen_size=screen_size)
        env = wrappers.OrderEnforcing(env)  # the one below is passed by
        env = wrappers.RecordEpisodeStatistics(env)
        if episodic_life:
            env = EpisodicLife(env)
        if "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
            env = FireToBegin(env)
        if clip_reward:
            env = wrappers.TransformReward(env, _sign)
        super().__init__(wrappers.FrameStackObservation(env, stack))


class QuickFrames(wrappers.AtariPreprocessing):
    """The same frames from the emulator itself.

    The env's own step copies a coloured picture of every frame, of which none is looked at.
    """

    @staticmethod
    def suits(env: gym.Env[Any, Any]) -> bool:
        """Whether nothing between here and the emulator has a say in a step."""
        while isinstance(env, (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker)):
            env = env.env
        is_ale = type(env).__module__.startswith("ale_py.") and env is env.unwrapped
        one_frame = getattr(env, "_frameskip", None) == 1
        return is_ale and one_frame and isinstance(env.action_space, spaces.Discrete)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        game = cast("Any", self.unwrapped)
        ale, code, reward, last = game.ale, game._action_set[action], 0.0, self.frame_skip - 1
        for frame in range(self.frame_skip):
            reward += ale.act(code, 1.0)  # in 0.10.1 the strength has no default
            if ale.game_over():
                break
            if frame >= last - 1:
                ale.getScreenGrayscale(self.obs_buffer[last - frame])
        terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
        self.game_over = terminated
        obs = self._get_obs()  # type: ignore[no-untyped-call]
        return obs, reward, terminated, truncated, game._get_info()


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life; the game itself goes on until the last one is lost."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._lives = 0
        self._over = True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._over or kwargs.get("seed") is not None:
            obs, info = self.env.reset(**kwargs)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)  # on, into the next life
            if terminated or truncated:
                obs, info = self.env.reset(**kwargs)
        self._over = False
        self._lives = self._lives_left()
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._over = terminated or truncated
        lives = self._lives_left()
        lost = 0 < lives < self._lives
        self._lives = lives
        return obs, reward, terminated or lost, truncated, info

    def _lives_left(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]


class FireToBegin(gym.Wrapper[Any, Any, Any, Any]):
    """Presses the button that some games wait for."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.env.reset(**kwargs)
        meanings = self.env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        obs, _, terminated, truncated, info = self.env.step(meanings.index("FIRE"))
        if terminated or truncated:
            return self.env.reset(**kwargs)
        return obs, info


def _sign(reward: Any) -> float:
    return float(np.sign(reward))
