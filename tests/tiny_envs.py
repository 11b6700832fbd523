"""Tiny deterministic envs whose numbers show their origin. Workers import this file."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class CountingEnv(gym.Env[Any, Any]):
    """Observation = step of the episode; reward = 10 * step; ends after ``length`` steps.

    ``ending``: terminated or truncated. ``reuse``: always return the same buffer, as emulators do.
    """

    def __init__(self, length: int = 3, ending: str = "terminated", *, reuse: bool = True) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.ending = ending
        self.reuse = reuse
        self._buffer = np.zeros(2, dtype=np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        ended = self._step >= self.length
        terminated = ended and self.ending == "terminated"
        truncated = ended and self.ending == "truncated"
        return self._observe(), 10.0 * self._step, terminated, truncated, {"step": self._step}

    def _observe(self) -> Any:
        self._buffer[:] = self._step
        return self._buffer if self.reuse else self._buffer.copy()


class ScoringEnv(CountingEnv):
    """Its final info has numbers, and values that are not numbers; it succeeds every other time."""

    n_episodes = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, {"speed": 99.0}
        self.n_episodes += 1
        info = {
            "is_success": np.bool_(self.n_episodes % 2 == 0),
            "n_goals": self.n_episodes,
            "speed": np.float32(0.5),
            "ratio": float("nan"),
            "name": "far",
            "action_mask": np.ones(2, dtype=bool),
            "path": [1.0, 2.0],
            "parts": {"a": 1.0},
            "missing": None,
        }
        return obs, reward, terminated, truncated, info


class NoisyEnv(gym.Env[Any, Any]):
    """Draws everything from its own generator, to show that it was seeded."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "vector": spaces.Box(-10, 10, (3,), np.float64),
                "parts": spaces.Tuple(
                    (
                        spaces.Discrete(5),
                        spaces.MultiBinary(4),
                        spaces.Box(0, 255, (2, 2), np.uint8),
                    )
                ),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {"options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = float(self.np_random.random())
        terminated, truncated = draw < 0.1, 0.1 <= draw < 0.2
        info = {"draw": draw, "nested": {"action": np.asarray(action).copy()}} if draw > 0.5 else {}
        return self._observe(), draw + float(np.sum(action)), terminated, truncated, info

    def _observe(self) -> Any:
        random = self.np_random
        return {
            "vector": random.normal(size=3).clip(-10, 10),
            "parts": (
                int(random.integers(5)),
                random.integers(2, size=4).astype(np.int8),
                random.integers(256, size=(2, 2)).astype(np.uint8),
            ),
        }


class OddError(Exception):
    """Can be pickled, but not unpickled: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


class FaultyEnv(CountingEnv):
    """Misbehaves in the second step after a reset, if it was seeded ``culprit``.

    ``where``: step, or reset, call or close instead.
    """

    def __init__(self, fault: str, culprit: int, where: str = "step") -> None:
        super().__init__(length=1000)
        self.fault = fault
        self.culprit = culprit
        self.where = where
        self._is_culprit = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._is_culprit = seed == self.culprit
        if self._is_culprit and self.where == "reset":
            misbehave(self.fault)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._is_culprit and self.where == "step" and self._step == 2:
            if self.fault == "wrong shape":
                obs = np.zeros(1, dtype=np.float32)
            elif self.fault == "no reward":
                reward = None
            elif self.fault == "no flag":
                terminated = None
            elif self.fault == "nan":
                obs = np.array([1.0, np.nan], dtype=np.float32)
            elif self.fault == "infinite reward":
                reward = float("inf")
            else:
                misbehave(self.fault)
        return obs, reward, terminated, truncated, info

    def poke(self) -> int:
        if self._is_culprit and self.where == "call":
            misbehave(self.fault)
        return 1

    def close(self) -> None:
        if self._is_culprit and self.where == "close":
            misbehave(self.fault)


def misbehave(fault: str) -> None:
    if fault == "raise":
        raise LookupError("puck left the table")
    if fault == "key error":
        raise KeyError("puck")
    if fault == "odd error":
        raise OddError("one", "way")
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(7)
    if fault == "sys.exit":
        raise SystemExit(3)
    if fault == "segfault":
        faulthandler.disable()  # pytest's handler would print a long traceback
        ctypes.string_at(0)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        time.sleep(1000)
    if fault == "hang in C":
        ctypes.PyDLL(None).sleep(1000)  # keeps the GIL, so no other thread can run


class SpaceEnv(gym.Env[Any, Any]):
    """Observes samples of any space; its infos contain the actions."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = copy.deepcopy(observation_space)  # each env draws its own samples
        self.action_space = copy.deepcopy(action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {"options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = float(self.np_random.random())
        terminated, truncated = draw < 0.1, 0.1 <= draw < 0.2
        info: dict[str, Any] = {"action": repr(action)} if draw > 0.4 else {}
        if draw > 0.7:
            info["nested"] = {"draw": draw, "array": np.array([draw, 1.0])}
        return self.observation_space.sample(), draw, terminated, truncated, info


class OnePart(gym.Wrapper[Any, Any, Any, Any]):
    """The env with its action in a tuple or dict."""

    def __init__(self, env: Any, *, as_dict: bool = False) -> None:
        super().__init__(env)
        space = env.action_space
        self._key = "only" if as_dict else 0
        self.action_space = spaces.Dict(only=space) if as_dict else spaces.Tuple((space,))

    def step(self, action: Any) -> Any:
        return self.env.step(action[self._key])


class NanEnv(CountingEnv):
    """Its 20th reward is NaN, but not in the trial before training, which has seed 0."""

    n_steps, is_trial = 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.is_trial = seed == 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        self.n_steps += 1
        if self.n_steps == 20 and not self.is_trial:
            reward = float("nan")
        return obs, reward, terminated, truncated, info


class Unpicklable(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (i for i in ())


class WordsEnv(CountingEnv):
    """Observes text, which PPO does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Text(8)

    def _observe(self) -> Any:
        return "x" * (1 + self._step)


class EndlessEnv(CountingEnv):
    def __init__(self) -> None:
        super().__init__(length=10**9)


class UnseededEnv(EndlessEnv):
    """Ignores the seed of reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset()


class SlowEnv(CountingEnv):
    """A step takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class UncloseableEnv(CountingEnv):
    def close(self) -> None:
        raise OSError("the door is stuck")


def scale_reward(env: gym.Env[Any, Any], factor: float) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: factor * float(reward))


class MixedEnv(NoisyEnv):
    """Observes an image, a vector and a choice."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (6, 6, 1), np.uint8),
                "vector": spaces.Box(-10, 10, (3,), np.float64),
                "choice": spaces.Discrete(3),
            }
        )
        self.action_space = spaces.MultiDiscrete([3, 2])

    def _observe(self) -> Any:
        return {
            "image": self.np_random.integers(0, 256, (6, 6, 1), dtype=np.uint8),
            "vector": self.np_random.normal(size=3),
            "choice": int(self.np_random.integers(3)),
        }


class ForbiddingEnv(gym.Env[Any, Any]):
    """Allows one or two of four actions, which change each step; any other action raises."""

    def __init__(self, where: str = "info") -> None:
        self.where = where
        vector = spaces.Box(0, 1, (4,), np.float32)
        mask = spaces.MultiBinary(4)
        both = spaces.Dict({"observation": vector, "action_mask": mask})
        self.observation_space = vector if where == "info" else both
        self.action_space = spaces.Discrete(4)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._next()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self._mask[action]:
            raise ValueError(f"action {action} is forbidden by {self._mask}")
        self._step += 1
        obs, info = self._next()
        return obs, float(action == self._mask.argmax()), self._step >= 7, False, info

    def _next(self) -> tuple[Any, dict[str, Any]]:
        self._mask = np.zeros(4, dtype=np.int8)
        self._mask[self.np_random.choice(4, size=2)] = 1
        obs = self.np_random.random(4).astype(np.float32)
        if self.where == "info":
            return obs, {"action_mask": self._mask.copy()}
        return {"observation": obs, "action_mask": self._mask.copy()}, {}


class BreakingEnv(CountingEnv):
    """Its fourth step returns NaN or infinity in ``what``: obs, reward or final."""

    def __init__(self, what: str | None = "obs") -> None:
        super().__init__(length=50, reuse=False)
        self.what = what
        if what != "huge":
            self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not np.isfinite(action).all():
            raise ValueError(f"action {action} is not finite")
        obs, reward, terminated, truncated, info = super().step(action)
        if self._step == 4:
            if self.what in ("obs", "final"):
                obs[1] = np.nan
            truncated = truncated or self.what == "final"
            reward = {"reward": np.inf, "huge": 3e38}.get(str(self.what), reward)
        return obs, reward, terminated, truncated, info


class LivesEnv(gym.Env[Any, Any]):
    """A game of several lives of two steps each; ``wrapped`` ends an episode after every life."""

    def __init__(self, lives: int) -> None:
        self.observation_space = spaces.Box(0, 10, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.lives = lives
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        obs = np.full(1, self._step, dtype=np.float32)
        return obs, 1.0, self._step == 2 * self.lives, False, {"life": self._step // 2}

    @staticmethod
    def wrapped(lives: int) -> gym.Env[Any, Any]:
        return LostLifeEnds(gym.wrappers.RecordEpisodeStatistics(LivesEnv(lives)))


class LostLifeEnds(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode with a life while the game continues; halves the rewards."""

    counts_own_episodes = True
    _over = True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._over:
            self._last, info = self.env.reset(**kwargs)
            return self._last, info
        return self._last, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._last, reward, terminated, truncated, info = self.env.step(action)
        self._over = terminated or truncated
        lost = self.env.unwrapped._step % 2 == 0  # type: ignore[attr-defined]
        return self._last, 0.5 * float(reward), terminated or lost, truncated, info


class FramesEnv(gym.Env[Any, Any]):
    """Observes a small random image; about one step in ten ends an episode, in either way."""

    def __init__(self, *, with_vector: bool = False, shape: tuple[int, ...] = (2, 3)) -> None:
        image = spaces.Box(0, 255, tuple(shape), np.uint8)
        both = spaces.Dict({"image": image, "vector": spaces.Box(-10, 10, (3,), np.float32)})
        self.observation_space = both if with_vector else image
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = float(self.np_random.random())
        ends = draw < 0.06, 0.04 < draw < 0.1  # sometimes both
        return self.observation_space.sample(), draw, *ends, {}
