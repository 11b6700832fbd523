"""Evaluation: plays complete episodes of a policy in a single env."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from ml_pipeline.agents.observations import batched
from ml_pipeline.envs.episode_stats import counts_episodes
from ml_pipeline.protocols import Episode, Policy

# An env without a time limit may never end an episode. This is longer than any usual limit:
# Atari's is 27,000 steps of 4 frames.
MAX_EPISODE_STEPS = 30_000


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
    episodes, n_cut = [], 0
    counts_own_episodes = counts_episodes(env)
    for episode in range(n_episodes):
        obs, info = env.reset(seed=seed + episode)
        memory = policy.new_memory(1)
        episode_return, length, done = 0.0, 0, False
        while not done and length < max_episode_steps:
            action = policy.act_batch(
                batched(env.observation_space, [obs]),
                deterministic,
                action_mask=policy.mask_of({name: [value] for name, value in info.items()}),
                memory=memory,
            )[0]
            obs, reward, terminated, truncated, info = env.step(action)
            episode_return += float(reward)
            length += 1
            done = terminated or truncated
            if done and counts_own_episodes and "episode" not in info:
                # A wrapper ended the episode after a lost life, but the game continues.
                obs, info = env.reset()
                memory, done = policy.new_memory(1), False
        if done and counts_own_episodes:
            episode_return, length = float(info["episode"]["r"]), int(info["episode"]["l"])
        n_cut += not done
        episodes.append(Episode(episode_return, length))
    return Evaluation(episodes, n_cut)
