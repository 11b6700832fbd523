"""Evaluation: plays complete episodes of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from ml_pipeline.envs.episode_stats import Episode, row_numbers
from ml_pipeline.envs.evaluation import (
    END,
    EVALUATED,
    MAX_EPISODE_STEPS,
    MAX_STEPS,
    STRIDE,
    EvaluationEnv,
)
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.contracts import Policy


class Evaluation(NamedTuple):
    """Played episodes and their statistics."""

    episodes: list[Episode]
    n_cut: int  # episodes that reached max_episode_steps

    @property
    def mean(self) -> float:
        return float(np.mean(self._returns()))

    @property
    def std(self) -> float:
        return float(np.std(self._returns()))

    @property
    def min(self) -> float:
        return float(np.min(self._returns()))

    @property
    def max(self) -> float:
        return float(np.max(self._returns()))

    @property
    def mean_length(self) -> float:
        return float(np.mean([episode.length for episode in self.episodes]))

    def _returns(self) -> list[float]:
        return [episode.episode_return for episode in self.episodes]


def evaluate(
    policy: Policy,
    env: gym.Env[Any, Any],
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Evaluation:
    """Play ``n_episodes``; episode k starts from seed + k, so each can be replayed alone."""
    with closing(SerialEnv([partial(EvaluationEnv, lambda: env, is_borrowed=True)])) as envs:
        return evaluate_batch(
            policy,
            envs,
            n_episodes=n_episodes,
            seed=seed,
            deterministic=deterministic,
            max_episode_steps=max_episode_steps,
        )


def evaluate_batch(
    policy: Policy,
    envs: VectorEnv[Any, Any, Any],
    *,
    n_episodes: int,
    seed: int,
    deterministic: bool,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Evaluation:
    """As ``evaluate``, in the envs of ``make_evaluation_envs``; env i of n plays i, i + n, ..."""
    n_envs = envs.num_envs
    options = {STRIDE: n_envs, END: seed + n_episodes, MAX_STEPS: max_episode_steps}
    obs, infos = envs.reset(seed=seed, options=options)  # env i gets seed + i
    memory, first_memory = policy.new_memory(n_envs), policy.new_memory(n_envs)
    episodes: dict[int, Episode] = {}
    n_cut = 0
    while len(episodes) < n_episodes:
        mask = policy.mask_of(infos)
        action = policy.act_batch(obs, deterministic, action_mask=mask, memory=memory)
        obs, _, terminated, truncated, infos = envs.step(action)
        done = np.flatnonzero(terminated | truncated).tolist()
        if not done:
            continue
        if memory is not None and first_memory is not None:
            memory[done] = first_memory[done]
        for number, episode, is_cut in _evaluated(infos.get("final_info", {}), done):
            if number < seed + n_episodes:  # else the number of envs exceeds that of episodes
                episodes[number] = episode
                n_cut += is_cut
    return Evaluation([episodes[number] for number in sorted(episodes)], n_cut)


def _evaluated(final_info: Mapping[str, Any], done: list[int]) -> list[tuple[int, Episode, bool]]:
    """Seed, episode, and whether it was cut, for each episode that ended in this step."""
    if EVALUATED not in final_info:
        return []
    result, has_result = final_info[EVALUATED], final_info[f"_{EVALUATED}"]
    return [
        (
            int(result["seed"][i]),
            Episode(
                float(result["return"][i]), int(result["length"][i]), 1, row_numbers(final_info, i)
            ),
            bool(result["is_cut"][i]),
        )
        for i in done
        if has_result[i]
    ]
