"""Collectors: play a policy in many envs and write what happened into a rollout buffer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.envs.episode_stats import EpisodeStats
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.protocols import Episode, RolloutStats, State
from ml_pipeline.training.rollout_buffer import Outcome, RolloutBuffer


class SyncCollector:
    """One forward pass, then one step of all envs, in turn."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *, env_seed: int, noise_seed: int) -> None:
        """Env i is reset with ``env_seed + i`` before the first step."""
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"the collector needs an env with autoreset_mode SAME_STEP, this one has {mode}; "
                "pass autoreset_mode=AutoresetMode.SAME_STEP to its constructor"
            )
        self.env = env
        self.n_envs = env.num_envs
        self._env_seed = env_seed
        self._generator = torch.Generator().manual_seed(noise_seed)
        self._state_before: Tensor | None = None  # the generator's, while a rollout is under way
        self._stats = EpisodeStats(env.num_envs)
        self._obs: NDArray[Any] | None = None

    def collect(self, agent: PPOAgent, buffer: RolloutBuffer) -> RolloutStats:
        """Fill ``buffer``; the values of what follows its last row are in ``last_value``."""
        start = time.perf_counter()
        episodes: list[Episode] = []
        if self._obs is None:
            self._obs, _ = self.env.reset(seed=self._env_seed)
        self._state_before = self._generator.get_state()
        noise = agent.draw_noise(buffer.n_steps, self.n_envs, self._generator)
        for t in range(buffer.n_steps):
            obs = agent.to_tensor(self._obs)
            sample = agent.sample_batch(obs, noise[t])
            action = agent.to_env_action(sample.action)
            self._obs, reward, terminated, truncated, infos = self.env.step(action)
            final_value = sample.value
            if truncated.any():
                final_value = self._final_value(agent, truncated, infos)
            outcome = Outcome(
                # float32 on purpose: rewards are doubles, and MPS has no float64.
                torch.as_tensor(reward.astype(np.float32), device=agent.device),
                torch.as_tensor(terminated, device=agent.device),
                torch.as_tensor(truncated, device=agent.device),
                final_value,
            )
            buffer.write(t, obs, sample, outcome)
            episodes += self._stats.step(reward, terminated | truncated)
        self._state_before = None
        return RolloutStats(episodes, time.perf_counter() - start)

    def resize(self, n_envs: int) -> None:
        """Between two rollouts; episodes in envs that stay go on."""
        if not isinstance(self.env, ParallelEnv):
            raise TypeError(f"{type(self.env).__name__} cannot change its number of envs")
        obs, _ = self.env.resize(n_envs)
        self._obs = obs if self._obs is not None else None
        self._stats.resize(n_envs)
        self.n_envs = n_envs

    def last_value(self, agent: PPOAgent) -> Tensor:
        """Value of the observations that follow the last row, [n_envs]."""
        if self._obs is None:
            raise RuntimeError("last_value before the first collect")
        return agent.value_batch(agent.to_tensor(self._obs))

    def _final_value(
        self, agent: PPOAgent, truncated: NDArray[np.bool_], infos: dict[str, Any]
    ) -> Tensor:
        """V(final observation) where truncated, 0 elsewhere, [n_envs]."""
        value = torch.zeros(self.n_envs, device=agent.device)
        rows = np.flatnonzero(truncated)
        final_obs = np.stack([infos["final_obs"][row] for row in rows])
        index = torch.as_tensor(rows, device=agent.device)
        value[index] = agent.value_batch(agent.to_tensor(final_obs))
        return value

    def state_dict(self) -> State:
        """The draws of a rollout that was cut short do not count."""
        state = self._generator.get_state() if self._state_before is None else self._state_before
        return {"generator": state}

    def load_state_dict(self, state: State) -> None:
        self._generator.set_state(state["generator"])
