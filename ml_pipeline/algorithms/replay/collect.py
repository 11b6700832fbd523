"""ReplaySteps: plays an agent in a vector env and writes every transition to a replay buffer.

Envs in workers step while the agent learns. For a tensor env, acting, the step of all envs and the
write of the row are captured as one graph, if graphs are enabled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Envs
from ml_pipeline.training.device_envs import DeviceEnvs
from ml_pipeline.training.env_batch import (
    ArrayOrTensor,
    Choose,
    EnvBatch,
    restore_positions,
    saved_positions,
)
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.host_envs import FiniteCheck, HostEnvs


class ReplaySteps:
    """Between ``send`` and ``receive`` the caller may learn from the buffer."""

    def __init__(
        self,
        agent: ReplayAgent[Any, Any, Any],
        envs: Envs,
        replay: ReplayBuffer,
        programs: Programs,
    ) -> None:
        (env,) = envs.parts
        self._agent = agent
        self._replay = replay
        self._check = FiniteCheck(enabled=True)
        self._batch: EnvBatch
        if isinstance(env, TorchVectorEnv):
            self._batch = DeviceEnvs(env, seed=envs.first_seed, programs=programs)
        else:
            self._batch = HostEnvs(
                env,
                first=0,
                seed=envs.first_seed,
                check=self._check,
                infos_have_episodes=envs.infos_have_episodes,
                in_background=True,
                programs=programs,
            )
        self._rates: Any = None
        self._noises: ArrayOrTensor = None  # of an iteration
        self._noise: ArrayOrTensor = None  # of a step
        self._action: ArrayOrTensor = None
        self._episodes: list[Episode] = []
        self._is_under_way = False  # between ``begin`` and ``end`` of an iteration
        self._step: dict[Choose, Callable[[], None]] = {
            choose: programs.captured(partial(self._act_and_store, choose), "a step with replay")
            for choose in (self._explore, self._explore_at_random)
        }

    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        return self._batch.env

    def begin(self, rates: Any, noise: Tensor) -> None:
        """Before the steps of an iteration; resets the envs if they have not started."""
        self._rates = rates
        takes_arrays = self._agent.takes_arrays and self._batch.on_host
        self._noises = noise.numpy() if takes_arrays else noise
        was_interrupted, self._is_under_way = self._is_under_way, True
        if was_interrupted:
            self._batch.abandon()
        # After an interrupt the envs are a step ahead of the buffer, or start again.
        if self._batch.begin(self._agent) or was_interrupted:
            self._replay.end_episodes()
            self._replay.begin(*self._batch.seen())

    def send(self, t: int, *, is_random: bool) -> None:
        """Choose the actions of step ``t`` of the iteration; the envs step until ``receive``."""
        noise = self._noises[self._agent.distribution.noise_row(t)]
        choose = self._explore_at_random if is_random else self._explore
        if self._batch.on_host:
            self._action = self._batch.act(self._agent, choose, noise)
            return
        if self._noise is None:
            self._noise = torch.empty_like(noise)
        self._noise.copy_(noise)
        self._step[choose]()
        self._replay.count_row()

    def receive(self, t: int) -> None:
        """Wait for the envs, and write the results of step ``t`` of the iteration."""
        if self._batch.on_host:
            self._store(t)

    def _explore(self, inputs: PolicyInput, noise: Tensor, out: None = None) -> PolicySample:
        return self._agent.explore(inputs, noise, self._rates, is_random=False)

    def _explore_at_random(
        self, inputs: PolicyInput, noise: Tensor, out: None = None
    ) -> PolicySample:
        return self._agent.explore(inputs, noise, self._rates, is_random=True)

    @torch.no_grad()
    def _act_and_store(self, choose: Choose) -> None:
        self._batch.show()
        self._action = self._batch.act(self._agent, choose, self._noise)
        self._store(0)
        self._batch.end()

    def _store(self, t: int) -> None:
        agent = self._agent
        step = self._batch.receive(agent, t)
        if step is None:
            raise RuntimeError("the envs returned no step")
        self._replay.write(self._action, step)
        self._episodes += step.episodes
        if agent.config.normalize_obs:
            on_host = self._batch.on_host
            obs = agent.reader.to_tensors(step.obs, agent.device) if on_host else step.obs[""]
            agent.learn_moments(obs)

    def end(self, n_steps: int) -> list[Episode]:
        """After the steps of an iteration; returns the episodes that ended."""
        self._is_under_way = False
        self._check.n_steps += n_steps
        episodes, self._episodes = self._episodes, []
        return episodes + self._batch.ended_episodes()

    def snapshots(self) -> list[bytes]:
        """All envs as bytes; empty for tensor envs, which are part of ``position``."""
        return self._batch.snapshots()

    def resume_at(self, position: Any, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue within the saved episodes."""
        restore_positions([self._batch], position, snapshots, self._agent)
        self._is_under_way = False
        self._replay.begin(*self._batch.seen())

    def position(self) -> Any:
        """The current step of the envs, for a checkpoint."""
        return saved_positions([self._batch])

    def state_dict(self) -> StateDict:
        return {"n_steps": self._check.n_steps}

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes."""
        self._check.n_steps = state["n_steps"]
