"""Envs that only the tests of vector envs need. Workers import this file."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tiny_envs import CountingEnv, NoisyEnv, misbehave


class GivenEnv(CountingEnv):
    """Always observes ``obs``, even if it does not fit the space."""

    def __init__(self, space: Any, obs: Any) -> None:
        super().__init__(length=1000)
        self.observation_space = space
        self.given = obs

    def _observe(self) -> Any:
        return self.given


class PrintingEnv(CountingEnv):
    """Prints to stdout and stderr, through Python and through the descriptors."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        print("step!", "x" * 5000)
        os.write(1, b"raw out\n")
        os.write(2, b"raw err\n")
        return super().step(action)


class CodedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return CodedError, (self.code,)


class GatedEnv(CountingEnv):
    """A step waits until the file ``gate`` exists."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


class GatedLater(CountingEnv):
    """After ``n_free`` steps, a step waits until the file ``gate`` exists."""

    def __init__(self, gate: str, n_free: int) -> None:
        super().__init__()
        self.gate = gate
        self.n_free = n_free

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_free -= 1
        while self.n_free < 0 and not Path(self.gate).exists():
            time.sleep(0.01)
        return super().step(action)


class WaitsToBegin(CountingEnv):
    """Creates the file ``begun`` and cannot be constructed further."""

    def __init__(self, begun: str) -> None:
        super().__init__()
        Path(begun).touch()
        while True:
            time.sleep(0.01)


class InterruptingEnv(CountingEnv):
    """Its first step interrupts the parent, as Ctrl-C would, and takes another half second."""

    has_interrupted = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.has_interrupted:
            self.has_interrupted = True
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)
        return super().step(action)


class BulkyEnv(CountingEnv):
    """Infos larger than a socket buffer; ``close`` writes the file ``closed``."""

    def __init__(self, closed: Path | None = None, n_bytes: int = 4_000_000) -> None:
        super().__init__(length=10**9)
        self.closed = closed
        self.n_bytes = n_bytes

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"bulk": bytes(self.n_bytes)}

    def close(self) -> None:
        if self.closed is not None:
            self.closed.write_text("yes")


class RegularEnv(NoisyEnv):
    """Infos of every type that Gymnasium batches, mostly with the same keys; one type changes."""

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


class ThreadEnv(CountingEnv):
    """Starts a thread that does not end in time, and never stops it."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=time.sleep, args=(1000.0,), name="of an env", daemon=False).start()


class MovingEnv(CountingEnv):
    """A step moves the process to a folder, which it removes."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        return super().step(action)

    def folder(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return os.getcwd()
        return None


class Colour(spaces.Space[Any]):
    """A custom space."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"#{int(self.np_random.integers(2**24)):06x}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x.startswith("#")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colour)


class WorkerModules(CountingEnv):
    """Reports the modules and the id of its process."""

    def has_module(self, name: str) -> bool:
        return name in sys.modules

    def pid(self) -> int:
        return os.getpid()


def faulty_factory(fault: str) -> gym.Env[Any, Any]:
    misbehave(fault)
    return CountingEnv()


class BreaksOnRankOne(CountingEnv):
    """On rank 1 of torchrun, or ``rank``, a step raises an error once the file ``gate`` exists."""

    def __init__(self, gate: str, rank: int = 1) -> None:
        super().__init__(length=1000)
        self.gate = Path(gate)
        self.rank = rank

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if os.environ.get("RANK") == str(self.rank) and self.gate.exists():
            self._fail()
        return super().step(action)

    def _fail(self) -> None:
        raise RuntimeError("the puck left the table")


class HangsOnRankOne(BreaksOnRankOne):
    """On rank 1 of torchrun, a step never ends once the file ``gate`` exists."""

    def _fail(self) -> None:
        while True:
            time.sleep(0.01)
