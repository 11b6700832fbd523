"""Tiny deterministic envs; their numbers tell where they come from. Workers import this file."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class CountingEnv(gym.Env[Any, Any]):
    """Observation = step of the episode; reward = 10 * step; ends after ``length`` steps.

    ``ending`` says how; ``reuse`` hands out one buffer again and again, as some emulators do.
    """

    def __init__(self, length: int = 3, ending: str = "terminated", *, reuse: bool = True) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.ending = ending
        self.reuse = reuse
        self._buffer = np.zeros(2, dtype=np.float32)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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


class NoisyEnv(gym.Env[Any, Any]):
    """Everything is drawn from the env's own generator: shows whether seeds arrive."""

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

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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


class FaultyEnv(CountingEnv):
    """Does something bad in the second step after a reset, if it was seeded ``culprit``.

    ``where`` puts a raise or a hang elsewhere: into reset, call or close.
    """

    def __init__(self, fault: str, culprit: int, where: str = "step") -> None:
        super().__init__(length=1000)
        self.fault = fault
        self.culprit = culprit
        self.where = where
        self._is_culprit = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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
    if fault == "odd exception":
        raise OddError("a", "b")
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(7)
    if fault == "sys.exit":
        raise SystemExit(3)
    if fault == "segfault":
        faulthandler.disable()  # pytest's would print a page
        ctypes.string_at(0)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hang":
        time.sleep(1000)
    if fault == "hang in C":
        ctypes.PyDLL(None).sleep(1000)  # keeps the GIL, so no thread of this process runs


def faulty_factory(fault: str, is_culprit: bool) -> gym.Env[Any, Any]:
    if is_culprit:
        misbehave(fault)
    return CountingEnv()


class SpaceEnv(gym.Env[Any, Any]):
    """Observes samples of any space; its infos tell the actions that it was given."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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


class RegularEnv(NoisyEnv):
    """The same keys in every info, of every kind that Gymnasium batches; a type may change."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        draw = self.np_random.random()
        info = {
            "float": draw,
            "int": int(10 * draw),
            "flag": draw > 0.5,
            "single": np.float32(draw),
            "array": np.array([draw, reward], dtype=np.float32),
            "mixed": int(10 * draw) if draw > 0.7 else draw,
        }
        if draw > 0.8:
            info["word"] = "rare"
        if draw > 0.4:
            del info["mixed"]
        return obs, reward, terminated, truncated, info


class Colour(spaces.Space[Any]):
    """A space of a user's own."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"#{int(self.np_random.integers(2**24)):06x}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x.startswith("#")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colour)


class GivenEnv(CountingEnv):
    """Hands out ``obs`` for ever, whatever its space says."""

    def __init__(self, space: Any, obs: Any) -> None:
        super().__init__(length=1000)
        self.observation_space = space
        self.given = obs

    def _observe(self) -> Any:
        return self.given


class PrintingEnv(CountingEnv):
    """Chatters on both streams, by Python and by descriptor."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        print("step!", "x" * 5000)
        os.write(1, b"raw out\n")
        os.write(2, b"raw err\n")
        return super().step(action)


class OddError(Exception):
    """Pickles, but does not come back: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


class CodedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return CodedError, (self.code,)


class RaisingEnv(CountingEnv):
    """Raises any kind of exception in its first step."""

    def __init__(self, kind: Any, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.kind = kind
        self.arguments = arguments

    def step(self, action: Any) -> Any:
        raise self.kind(*self.arguments)


class OneWay:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise ValueError("one way only")


class UnpicklableEnv(CountingEnv):
    def gift(self) -> OneWay:
        return OneWay()


class BigInfoEnv(CountingEnv):
    """Infos of half a megabyte in every step."""

    def __init__(self) -> None:
        super().__init__(length=10**9)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"bulk": bytes(500_000)}


class NanEnv(CountingEnv):
    """Its 20th reward is no number."""

    n_steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        self.n_steps += 1
        return obs, float("nan") if self.n_steps == 20 else reward, terminated, truncated, info


class WordsEnv(CountingEnv):
    """Observes words, which PPO cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Text(8)

    def _observe(self) -> Any:
        return "x" * (1 + self._step)


class EndlessEnv(CountingEnv):
    def __init__(self) -> None:
        super().__init__(length=10**9)


class SlowEnv(CountingEnv):
    """A step takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class GatedEnv(CountingEnv):
    """A step waits until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


class InterruptingEnv(CountingEnv):
    """Its first step has the parent interrupted, as Ctrl-C would, and goes on for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.has_interrupted = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.has_interrupted:
            self.has_interrupted = True
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)
        return super().step(action)


class BulkyEnv(CountingEnv):
    """Infos larger than a pipe holds; leaves a file behind when it is closed."""

    def __init__(self, closed: Any) -> None:
        super().__init__()
        self.closed = closed

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"bulk": bytes(4_000_000)}

    def close(self) -> None:
        self.closed.write_text("yes")


class UncloseableEnv(CountingEnv):
    def close(self) -> None:
        raise OSError("the door is stuck")


class WorkerModules(CountingEnv):
    """Tells what its process has imported and holds."""

    def has_module(self, name: str) -> bool:
        import sys

        return name in sys.modules

    def pid(self) -> int:
        return os.getpid()


def make_broken() -> gym.Env[Any, Any]:
    raise OSError("the simulator is not installed")


def scale_reward(env: gym.Env[Any, Any], factor: float) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: factor * float(reward))


def shift_reward(env: gym.Env[Any, Any], by: float) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: float(reward) + by)


class MixedEnv(gym.Env[Any, Any]):
    """Image, vector and choice at once, drawn from the env's own generator; episodes end."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (6, 6, 1), np.uint8),
                "vector": spaces.Box(-10, 10, (3,), np.float64),
                "choice": spaces.Discrete(3),
            }
        )
        self.action_space = spaces.MultiDiscrete([3, 2])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = float(self.np_random.random())
        return self._observe(), draw + float(np.sum(action)), draw < 0.1, 0.1 <= draw < 0.2, {}

    def _observe(self) -> Any:
        return {
            "image": self.np_random.integers(0, 256, (6, 6, 1), dtype=np.uint8),
            "vector": self.np_random.normal(size=3),
            "choice": int(self.np_random.integers(3)),
        }


class ForbiddingEnv(gym.Env[Any, Any]):
    """Allows one or two of four actions, others each step, and raises at any other."""

    def __init__(self, where: str = "info") -> None:
        self.where = where
        vector = spaces.Box(0, 1, (4,), np.float32)
        mask = spaces.MultiBinary(4)
        both = spaces.Dict({"observation": vector, "action_mask": mask})
        self.observation_space = vector if where == "info" else both
        self.action_space = spaces.Discrete(4)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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
    """Its fourth step gives what is no number: in ``what`` of obs, reward and final."""

    def __init__(self, what: str | None = "obs") -> None:
        super().__init__(length=50, reuse=False)
        self.what = what
        if what != "huge":
            self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not np.isfinite(action).all():
            raise ValueError(f"an action that is no number: {action}")
        obs, reward, terminated, truncated, info = super().step(action)
        if self._step == 4:
            if self.what in ("obs", "final"):
                obs[1] = np.nan
            truncated = truncated or self.what == "final"
            reward = {"reward": np.inf, "huge": 3e38}.get(str(self.what), reward)
        return obs, reward, terminated, truncated, info


class LivesEnv(gym.Env[Any, Any]):
    """A game of several lives, two steps each, that a wrapper ends after every life."""

    def __init__(self, lives: int) -> None:
        self.observation_space = spaces.Box(0, 10, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.lives = lives
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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
    """Ends the learner's episode with a life; the game goes on, and rewards are halved."""

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
