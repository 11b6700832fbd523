"""Every way to run envs, for tests that all of them must pass, and helpers for these tests."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from tiny_envs import FaultyEnv

from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc or forks")

# Forked workers start much faster than spawned ones.
forked = partial(ParallelEnv, start_method="fork", n_workers=2)
WAYS: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": forked,
    "shared": partial(forked, main_slice=True),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
# For tests with many other parameters: "shared" runs the code of the other two side by side.
each_way_shared_slow = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=[pytest.mark.slow] if name == "shared" else [])
        for name, way in WAYS.items()
    ],
)


def starts(*fast: tuple[str, int]) -> pytest.MarkDecorator:
    """Start methods with one worker for all envs, for two, and for each; some are slow tests."""
    every = [("fork", 1), ("spawn", 2), ("fork", 4)]
    ways = [
        pytest.param(
            partial(ParallelEnv, start_method=method, n_workers=n),
            marks=[] if (method, n) in fast else pytest.mark.slow,
            id=f"{method}-{n}",
        )
        for method, n in every
    ]
    return pytest.mark.parametrize("way", ways)


each_start = starts(("fork", 4), ("spawn", 2))
each_start_mostly_slow = starts(("fork", 4))  # for tests with many other parameters


def four_envs(fault: str, where: str = "step") -> list[Any]:
    """Four envs, of which env 3 misbehaves in its second step if ``seed`` is 7."""
    return [partial(FaultyEnv, fault, 10, where)] * 4


def zeros(env: Any) -> Any:
    """The action 0 for every env."""
    return np.zeros(env.num_envs, dtype=np.int64)


def trajectory(make: Any, env_fns: list[Any], mode: AutoresetMode, n_steps: int) -> list[Any]:
    """Everything that a vector env returns in two resets and ``n_steps`` steps."""
    with contextlib.closing(make(env_fns, autoreset_mode=mode)) as env:
        env.action_space.seed(3)
        seen = flat(list(env.reset(seed=5, options={"level": 1})))
        for _ in range(n_steps):
            step = env.step(env.action_space.sample())
            seen += flat(list(step))
            done = step[2] | step[3]
            if mode is AutoresetMode.DISABLED and done.any():
                seen += flat(list(env.reset(options={"reset_mask": done, "level": 2})))
        return seen + flat(list(env.reset(seed=list(range(env.num_envs)))))


@contextlib.contextmanager
def answers_within(seconds: float) -> Iterator[None]:
    """Detects a hang; the bounds are too wide to measure speed (see benchmarks/vec_env.py)."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def flat(value: Any) -> list[Any]:
    """All leaves of an observation or info, as bytes or plain values, in a fixed order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in [key, *flat(value[key])]]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in flat(part)]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [leaf for part in value for leaf in flat(part)]
    if isinstance(value, str) or value is None:
        return [value]
    array = np.asarray(value)  # a Discrete observation may be an int or a NumPy integer
    return [array.dtype.str, array.shape, array.tobytes()]
