"""Collector: plays a policy in many envs and writes the transitions into a rollout buffer.

With one vector env it acts and steps in turn. With several it is double-buffered: it acts in one
while the others step. Each vector env has its own columns of the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.rollout import FinalStep, RolloutBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.observations import ObservationError
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict
from ml_pipeline.training.acting import GpuActing
from ml_pipeline.training.checks import BadValueError, FiniteCheck
from ml_pipeline.training.columns import Columns, joined_inputs, restore_columns
from ml_pipeline.training.contracts import Actor, RolloutStats
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.reward_scaler import RewardScaler


class Collector:
    """Collects rollouts in ``envs``; the buffer has their columns in the same order."""

    on_host = True

    def __init__(
        self,
        envs: Sequence[VectorEnv[Any, Any, Any]],
        *,
        env_seed: int,
        noise_seed: int,
        infos_have_episodes: bool = False,
        allow_nonfinite: bool = False,
        programs: Programs | None = None,
        world: World = ALONE,
    ) -> None:
        """Env i is reset with ``env_seed + i`` before the first step.

        ``infos_have_episodes``: see ``EpisodeStats``. ``allow_nonfinite``: continue with NaN and
        infinity in observations and rewards; otherwise they raise a ``BadValueError``.
        """
        self.n_envs = 0
        self._columns: list[Columns] = []
        for env in envs:
            first, in_turns = self.n_envs, len(envs) > 1
            self._columns.append(Columns(env, first, infos_have_episodes, in_turns))
            self.n_envs += env.num_envs
        self._env_seed = env_seed
        self._programs = programs
        self._world = world
        self._check = FiniteCheck(enabled=not allow_nonfinite)
        self._generator = torch.Generator().manual_seed(noise_seed)
        self._state_before: Tensor | None = None  # the generator's, during a rollout

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [columns.env for columns in self._columns]

    @property
    def is_between_rollouts(self) -> bool:
        """Whether the envs are where the last complete rollout left them."""
        return self._state_before is None

    def new_buffer(self, n_steps: int, agent: Any) -> RolloutBuffer:
        return RolloutBuffer(n_steps, self.n_envs, agent)

    def new_scaler(self, *, gamma: float, clip: float) -> RewardScaler[NDArray[Any]]:
        return RewardScaler(np.zeros(self.n_envs), gamma=gamma, clip=clip, world=self._world)

    def collect(self, agent: Actor, buffer: RolloutBuffer) -> RolloutStats:
        """Fill ``buffer``; ``last_inputs`` then returns the policy's input after the last row."""
        start = time.perf_counter()
        episodes: list[Episode] = []
        self._begin(agent, buffer)
        n_envs, own = self._world.size * self.n_envs, self._world.envs(self.n_envs)
        noise: Any = agent.draw_noise(buffer.n_steps, n_envs, self._generator)[:, own]
        noise = noise.numpy() if agent.takes_arrays else noise
        noises = [list(noise[:, each.place]) for each in self._columns]
        for t in range(buffer.n_steps):
            for columns, rows in zip(self._columns, noises, strict=True):
                if t > 0:
                    episodes += self._receive(columns, t - 1, agent, buffer)
                self._act(columns, t, agent, buffer, rows[agent.distribution.noise_row(t)])
        for columns in self._columns:
            episodes += self._receive(columns, buffer.n_steps - 1, agent, buffer)
        return RolloutStats(episodes, time.perf_counter() - start)

    def commit(self, n_steps: int) -> None:
        """The agent learned from the rollout; before this call, an interrupt discards it."""
        self._state_before = None
        self._check.n_steps += n_steps

    def _begin(self, agent: Actor, buffer: RolloutBuffer) -> None:
        for columns in self._columns:
            if columns.action is not None and len(self._columns) > 1:
                columns.receive(agent)  # discards a step of an interrupted rollout
            columns.action = None
            if agent.device.type == "cuda" and columns.acting is None:
                programs = self._programs or Programs(agent.device)
                columns.acting = GpuActing(
                    agent, columns.env.num_envs, programs, agent.sample_batch
                )
            if not columns.leaves:
                columns.reset(agent, self._env_seed + columns.place.start)
                self._check.obs(columns.leaves, first_env=columns.place.start, t=0)
        memories = [each.memory for each in self._columns if each.memory is not None]
        buffer.begin(torch.cat(memories) if memories else None)
        self._state_before = self._generator.get_state()

    def _act(
        self, columns: Columns, t: int, agent: Actor, buffer: RolloutBuffer, noise: Tensor
    ) -> None:
        """Choose actions for row ``t`` and send them to the envs."""
        leaves, mask, start = columns.leaves, columns.mask, columns.episode_start
        if columns.acting is not None:
            columns.acting.begin(leaves, mask, columns.memory, start, noise)
            columns.memory = columns.acting.memory
            buffer.write_seen(t, columns.place, leaves, mask, start)  # while the GPU computes
            action: Any = columns.acting.actions()
        else:
            sample = agent.sample_batch(columns.inputs(agent), noise)
            action = sample.action if agent.takes_arrays else sample.action.cpu().numpy()
            columns.memory = sample.memory
            buffer.write_seen(t, columns.place, leaves, mask, start)
        buffer.action[t, columns.place] = action
        columns.send(agent.distribution.to_env(action))

    def _receive(
        self, columns: Columns, t: int, agent: Actor, buffer: RolloutBuffer
    ) -> list[Episode]:
        """Write the results of the actions of row ``t``; returns the episodes that ended."""
        first = columns.place.start
        try:
            reward, terminated, truncated, infos, episodes = columns.receive(agent)
        except ObservationError as error:
            env, when = first + error.index, self._check.when(t + 1)
            raise BadValueError(f"env {env}, at {when}: {error}") from error
        buffer.write_outcome(t, columns.place, reward, terminated, truncated)
        self._check.reward(reward, first_env=first, t=t)
        self._check.obs(columns.leaves, first_env=first, t=t + 1)
        if truncated.any():
            for row in np.flatnonzero(truncated & ~terminated).tolist():
                leaves = agent.reader.read(infos["final_obs"][row])
                one = {name: leaf[np.newaxis] for name, leaf in leaves.items()}
                self._check.obs(one, first_env=first + row, t=t + 1)
                memory = None if columns.memory is None else columns.memory[row].clone()
                buffer.final_steps.append(FinalStep(t, first + row, leaves, memory))
        return episodes

    def last_inputs(self, agent: Actor) -> PolicyInput:
        """The policy's input after the last row, in all envs."""
        return joined_inputs(self._columns, agent)

    def resize(self, n_envs: int, agent: Actor) -> None:
        """Call between two rollouts; remaining envs keep their episodes."""
        if len(self._columns) > 1:
            raise TypeError("collector=double cannot change its number of envs")
        self._columns[0].resize(n_envs, agent)
        self.n_envs = n_envs

    def snapshots(self) -> list[bytes]:
        """All envs as bytes."""
        return [each for columns in self._columns for each in columns.env.snapshot()]

    def resume_at(
        self, positions: list[StateDict] | None, snapshots: Sequence[bytes], agent: Actor
    ) -> None:
        """Continue within the episodes of ``snapshots``."""
        restore_columns(self._columns, positions, snapshots, agent)

    def state_dict(self) -> StateDict:
        """Saves the generator as it was before an interrupted rollout."""
        state = self._generator.get_state() if self._state_before is None else self._state_before
        positions = None
        if self.is_between_rollouts:
            positions = [columns.state_dict() for columns in self._columns]
        return {"generator": state, "n_steps": self._check.n_steps, "position": positions}

    def load_state_dict(self, state: StateDict) -> None:
        self._generator.set_state(state["generator"])
        self._check.n_steps = state["n_steps"]
