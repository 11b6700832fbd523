"""Envs that make a stop hard: a slow one, and one whose compiled code swallows exceptions."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

_LIBC = ctypes.CDLL(None)
_COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Slow(gym.Env[Any, Any]):
    """Each step takes ``seconds``; it reports the first ones, as many as fit into a pipe."""

    def __init__(self, seconds: float, continuous: bool = False) -> None:
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self._seconds = float(os.environ.get("STUBBORN_SECONDS", seconds))
        self._n_reports = 100

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._wait()
        if self._n_reports:
            self._n_reports -= 1
            print("took a step", flush=True)
        return self.np_random.random(2, np.float32), 1.0, False, False, {}

    def _wait(self) -> None:
        time.sleep(self._seconds)


class Swallowing(Slow):
    """It waits in Python that a C function calls; the C function ignores every exception."""

    def _wait(self) -> None:
        def compare(left: int, right: int) -> int:
            time.sleep(self._seconds / 8)
            return 0

        numbers = (ctypes.c_int * 4)(4, 3, 2, 1)
        _LIBC.qsort(numbers, 4, ctypes.sizeof(ctypes.c_int), _COMPARE(compare))
