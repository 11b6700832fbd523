"""Atari: the usual Atari preprocessing in one wrapper; see conf/env/pong.yaml and breakout.yaml.

Episodes start with random no-ops and FIRE, and end with each life. Frame skip is 4; the maximum
of the last two frames is used. Observations are stacks of four grey 84 x 84 frames; rewards are
their signs. Episode returns in the infos are those of the whole game, with unclipped rewards.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, Info

Frames = NDArray[np.uint8]
GameWrapper = gym.Wrapper[Frames, int, Frames, int]


class Atari(GameWrapper):
    """Wraps an env that does not skip frames itself, such as PongNoFrameskip-v4."""

    counts_own_episodes = True

    def __init__(
        self,
        env: AnyEnv,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        stack: int = 4,
        episodic_life: bool = True,
        clip_reward: bool = True,
    ) -> None:
        frames = QuickFrames if QuickFrames.suits(env) else wrappers.AtariPreprocessing
        env = frames(env, noop_max=noop_max, frame_skip=frame_skip, screen_size=screen_size)
        env = wrappers.OrderEnforcing(env)  # QuickFrames bypasses the one below
        env = wrappers.RecordEpisodeStatistics(env)
        if episodic_life:
            env = EpisodicLife(env)
        if "FIRE" in _game(env).get_action_meanings():
            env = FireToBegin(env)
        if clip_reward:
            env = wrappers.TransformReward(env, _sign)
        super().__init__(wrappers.FrameStackObservation(env, stack))


class QuickFrames(wrappers.AtariPreprocessing):
    """The same frames as ``AtariPreprocessing``, read directly from the emulator.

    It is faster: the env's own step also copies an unused RGB image of every frame.
    """

    @staticmethod
    def suits(env: AnyEnv) -> bool:
        """Whether no wrapper around ``env`` changes a step, and it does not skip frames."""
        while isinstance(env, (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker)):
            env = env.env
        is_ale = type(env).__module__.startswith("ale_py.") and env is env.unwrapped
        one_frame = getattr(env, "_frameskip", None) == 1
        return is_ale and one_frame and isinstance(env.action_space, spaces.Discrete)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        game = _game(self)
        ale, code, reward, last = game.ale, game._action_set[action], 0.0, self.frame_skip - 1
        for frame in range(self.frame_skip):
            reward += ale.act(code, 1.0)  # ale-py 0.10.1 has no default strength
            if ale.game_over():
                break
            if frame >= last - 1:
                ale.getScreenGrayscale(self.obs_buffer[last - frame])
        terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
        self.game_over = terminated
        frames: Any = self  # AtariPreprocessing has no types
        return frames._get_obs(), reward, terminated, truncated, game._get_info()


class EpisodicLife(GameWrapper):
    """Ends an episode with each life; the game continues until the last life is lost."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self._lives = 0
        self._over = True

    def reset(self, **kwargs: Any) -> tuple[Frames, Info]:
        if self._over or kwargs.get("seed") is not None:
            obs, info = self.env.reset(**kwargs)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)  # continues with the next life
            if terminated or truncated:
                obs, info = self.env.reset(**kwargs)
        self._over = False
        self._lives = self._lives_left()
        return obs, info

    def step(self, action: int) -> tuple[Frames, SupportsFloat, bool, bool, Info]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._over = terminated or truncated
        lives = self._lives_left()
        lost = 0 < lives < self._lives
        self._lives = lives
        return obs, reward, terminated or lost, truncated, info

    def _lives_left(self) -> int:
        return int(_game(self.env).ale.lives())


class FireToBegin(GameWrapper):
    """Presses FIRE after a reset, which some games need to start."""

    def reset(self, **kwargs: Any) -> tuple[Frames, Info]:
        self.env.reset(**kwargs)
        meanings = _game(self.env).get_action_meanings()
        obs, _, terminated, truncated, info = self.env.step(meanings.index("FIRE"))
        if terminated or truncated:
            return self.env.reset(**kwargs)
        return obs, info


def _game(env: AnyEnv) -> Any:
    """The env below all wrappers, with the methods that only Atari envs have."""
    return env.unwrapped


def _sign(reward: SupportsFloat) -> float:
    return float(np.sign(float(reward)))
