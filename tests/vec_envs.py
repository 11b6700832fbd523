"""Every way to run envs, for tests that all of them must pass, and helpers for these tests."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tiny_envs import FaultyEnv

from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv

# Forked workers start much faster than spawned ones.
forked = partial(ParallelEnv, start_method="fork", n_workers=2)
WAYS: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": forked,
    "shared": partial(forked, main_slice=True),
}
each_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())


def starts(*fast: tuple[str, int]) -> pytest.MarkDecorator:
    """All start methods and numbers of workers; those that are not ``fast`` are slow tests."""
    every = [(method, n) for method in ("fork", "spawn") for n in (1, 2, 4)]
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in every if each not in fast]
    return pytest.mark.parametrize(("start_method", "n_workers"), [*fast, *slow])


each_start = starts(("fork", 4), ("spawn", 2))
each_start_mostly_slow = starts(("fork", 4))  # for tests with many other parameters


@pytest.fixture(autouse=True)
def leaves_no_child() -> Iterator[None]:
    """Import this into a module to check each of its tests for leftover child processes."""
    yield
    if multiprocessing.active_children():
        gc.collect()  # an env that was not closed ends its workers when it is collected
    assert not multiprocessing.active_children()


def four_envs(fault: str, where: str = "step", **options: Any) -> ParallelEnv:
    """Four envs, of which env 3 (seed 10) misbehaves in its second step."""
    return ParallelEnv([partial(FaultyEnv, fault, 10, where)] * 4, seed=7, **options)


def zeros(env: Any) -> Any:
    """The action 0 for every env."""
    return np.zeros(env.num_envs, dtype=np.int64)


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
