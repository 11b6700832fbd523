"""The transitions of a vector env, found by a plain loop that knows its autoreset mode."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

Transition = tuple[Any, ...]  # obs, action, reward, terminated, truncated, next obs


def transitions(
    env: Any,
    n_steps: int,
    final_row: Callable[[Any, Any, int], Any],
    skips: bool,
    resets: bool,
    *,
    seed: int | None = 3,
    choose: Callable[[Any], Any] = lambda number: number % 2,
) -> list[list[Transition]]:
    """Those of each env, with the true next observation; ``final_row`` says where an end has it.

    ``skips``: a step after an end is not one; ``resets``: we reset what has ended. ``choose`` makes
    the actions from numbers that depend on the age of each episode.
    """
    n_envs = env.num_envs
    found: list[list[Transition]] = [[] for _ in range(n_envs)]
    obs, _ = env.reset() if seed is None else env.reset(seed=seed)
    ages, ended = np.zeros(n_envs, int), np.zeros(n_envs, bool)
    for _ in range(n_steps):
        action = choose(ages + np.arange(n_envs))
        before = deepcopy(obs)
        obs, reward, terminated, truncated, infos = env.step(action)
        done = terminated | truncated
        for i in range(n_envs):
            if not (skips and ended[i]):
                after = final_row(obs, infos, i) if done[i] else shown(obs, infos, i)
                step = plain(shown(before, {}, i)), plain(action[i]), float(reward[i])
                found[i].append((*step, bool(terminated[i]), bool(truncated[i]), plain(after)))
        is_reset = skips & ended
        ages = np.where(done | is_reset, 0, ages + 1)
        ended = done & ~is_reset
        if resets and done.any():
            obs, _ = env.reset(options={"reset_mask": done})
    return found


def shown(obs: Any, infos: Any, i: int) -> Any:
    """The row of env i."""
    if isinstance(obs, Mapping):
        return {key: shown(part, infos, i) for key, part in obs.items()}
    return obs[i]


def in_infos(obs: Any, infos: Any, i: int) -> Any:
    return infos["final_obs"][i]


def plain(value: Any) -> Any:
    """Checksums instead of arrays, which == compares."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    array = np.asarray(value)
    return array.shape, zlib.crc32(np.ascontiguousarray(array).data)
