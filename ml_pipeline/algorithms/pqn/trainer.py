"""PQNTrainer: one iteration of PQN. It collects a rollout, then learns from it in minibatches.

The value of an observation is that of its best action, so that ``gae`` makes lambda returns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.algorithms.pqn.agent import PQNAgent, PQNBatch, PQNConfig
from ml_pipeline.envs.episode_stats import Episode, EpisodeWindow
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.signals import Hold, never_held
from ml_pipeline.training.checks import NonFiniteError
from ml_pipeline.training.contracts import Algorithm, Envs, RunContext
from ml_pipeline.training.device_envs import DeviceEnvs
from ml_pipeline.training.env_batch import (
    ArrayOrTensor,
    EnvBatch,
    FinalObservation,
    Row,
    Seen,
    new_table,
    restore_positions,
    saved_positions,
    torch_dtype,
)
from ml_pipeline.training.host_envs import FiniteCheck, HostEnvs
from ml_pipeline.training.old_weights import load_parts
from ml_pipeline.training.returns import RolloutOutcome, gae
from ml_pipeline.training.schedules import find_schedule


class QRollout:
    """Transitions [T, n_envs]; arrays of host envs, tensors of tensor envs."""

    def __init__(self, n_steps: int, n_envs: int, agent: PQNAgent, *, on_host: bool) -> None:
        self.agent = agent
        reader, distribution = agent.reader, agent.distribution

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> ArrayOrTensor:
            return new_table((shape[0], n_envs, *shape[1:]), dtype, agent.device, on_host)

        # What the policy sees has one more row: the input after the last step.
        self.obs = {
            name: zeros(n_steps + 1, *reader.shapes[name], dtype=torch_dtype(reader.dtypes[name]))
            for name in reader.leaves
        }
        self.mask: ArrayOrTensor | None = None
        if agent.masks.are_used:
            self.mask = zeros(n_steps + 1, distribution.mask_size, dtype=torch.bool)
        self.action = zeros(n_steps, dtype=distribution.action_dtype)
        self.reward = zeros(n_steps)
        self.terminated = zeros(n_steps, dtype=torch.bool)
        self.truncated = zeros(n_steps, dtype=torch.bool)
        self.is_reset = np.zeros((n_steps, n_envs), dtype=bool)  # steps that only reset an env
        # Before the autoreset: those of tensor envs at every step, others where truncated.
        self.final: Seen | None = None
        if not on_host:
            leaves = {name: torch.zeros_like(leaf[:n_steps]) for name, leaf in self.obs.items()}
            mask = None if self.mask is None else torch.zeros_like(self.mask[:n_steps])
            self.final = Seen(leaves, mask, None)
        self.finals: list[tuple[int, FinalObservation]] = []  # with their row

    def seen(self, t: int) -> Seen:
        return _row_of(Seen(self.obs, self.mask, None), t)

    def row(self, t: int) -> Row:
        """Where the results of step ``t`` go."""
        ends = self.reward[t], self.terminated[t], self.truncated[t]
        final = None if self.final is None else _row_of(self.final, t)
        return Row(self.action[t], *ends, final, None, self.seen(t + 1))

    def inputs(self) -> PolicyInput:
        """All rows, [(T + 1) * n_envs, ...], on the agent's device."""
        if self.final is not None:
            return self._flat(Seen(self.obs, self.mask, None))
        obs = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in self.obs.items()}
        mask = None if self.mask is None else self.mask.reshape(-1, self.mask.shape[2])
        return self.agent.inputs(obs, mask)

    def _flat(self, seen: Seen) -> PolicyInput:
        """Tables [T, n_envs, ...] on the agent's device as one batch."""
        inputs = PolicyInput(self.agent.reader.joined(seen.obs), seen.mask, None, None)
        return inputs.mapped(lambda table: table.flatten(0, 1), None)

    @torch.no_grad()
    def targets(self, inputs: PolicyInput, *, gamma: float, td_lambda: float) -> Tensor:
        """Lambda returns, [T, n_envs]."""
        reward, terminated, truncated = (
            torch.as_tensor(each).to(self.agent.device)
            for each in (self.reward, self.terminated, self.truncated)
        )
        value = self.agent.values(inputs).amax(dim=1).view(-1, reward.shape[1])
        ends = value[:-1], value[-1], self._final_values(reward), terminated, truncated
        target: Tensor = RolloutOutcome(reward, *ends).estimate(gae, gamma=gamma, lam=td_lambda)[1]
        return target

    def _final_values(self, like: Tensor) -> Tensor:
        """The values of final observations where an episode was truncated, [T, n_envs]."""
        agent = self.agent
        if self.final is not None:
            return agent.values(self._flat(self.final)).amax(dim=1).view_as(like)
        found = torch.zeros_like(like)
        for t, final in self.finals:
            leaves = {name: leaf[np.newaxis] for name, leaf in final.leaves.items()}
            mask = None if final.mask is None else final.mask[np.newaxis]
            found[t, final.env] = agent.values(agent.inputs(leaves, mask)).amax()
        return found


def _row_of(seen: Seen, t: int) -> Seen:
    leaves = {name: leaf[t] for name, leaf in seen.obs.items()}
    return Seen(leaves, None if seen.mask is None else seen.mask[t], None)


class PQNTrainer:
    """Trains ``agent`` in one vector env."""

    def __init__(self, agent: PQNAgent, envs: Envs, config: PQNConfig, context: RunContext) -> None:
        self.agent = agent
        self.config = config
        self.progress = 0.0  # through the run, for the schedules
        self.episodes = EpisodeWindow()
        (env,) = envs.parts
        self._check = FiniteCheck(enabled=True)
        self._batch: EnvBatch
        if isinstance(env, DeviceVectorEnv):
            self._batch = DeviceEnvs(env, seed=envs.first_seed, programs=context.programs)
        else:
            self._batch = HostEnvs(
                env,
                first=0,
                seed=envs.first_seed,
                check=self._check,
                infos_have_episodes=envs.infos_have_episodes,
                in_background=False,
                programs=context.programs,
            )
        self._rollout = QRollout(config.n_steps, env.num_envs, agent, on_host=self._batch.on_host)
        self._schedule = find_schedule(
            config.learning_rate_schedule, key="agent.learning_rate_schedule"
        )
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "actions"))
        self._order = torch.Generator().manual_seed(stream_seed(context.seed, "minibatches"))
        self._state_before: Tensor | None = None  # the first generator's, during an iteration

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [self._batch.env]

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self._batch.env.num_envs)

    def train_episode_vectorized(self, hold: Hold = never_held) -> Metrics:
        """One iteration: collect a [T, n_envs] rollout, improve on it, return the metrics.

        An interrupt before ``hold`` discards the iteration; a later one waits for the end.
        """
        start = time.perf_counter()
        learning_rate = self.config.learning_rate * self._schedule(self.progress)
        epsilon = self.config.epsilon(self.progress)
        self._state_before = self._generator.get_state()
        try:
            episodes = self._collect(epsilon)
        except KeyboardInterrupt:
            self._batch.abandon()
            raise
        seconds = time.perf_counter() - start
        before = copy.deepcopy({"agent": self.agent.state_dict(), "order": self._order.get_state()})
        try:
            means = self._learn(learning_rate)
            hold()
        except BaseException:
            self._load_learnt(before)
            raise
        self._check.n_steps += self.config.n_steps
        self._state_before = None
        return {
            "n_envs": self._batch.env.num_envs,
            **self.episodes.add(episodes),
            **means,
            "policy/learning_rate": learning_rate,
            "policy/epsilon": epsilon,
            "time/collect_seconds": seconds,
        }

    @torch.no_grad()
    def _collect(self, epsilon: float) -> list[Episode]:
        """Fill the rollout; returns the episodes that ended."""
        agent, batch, rollout = self.agent, self._batch, self._rollout
        batch.begin(agent)
        batch.show(rollout.seen(0))
        n_steps = self.config.n_steps
        episodes: list[Episode] = []
        rollout.finals = []
        noise = agent.draw_noise(n_steps, batch.env.num_envs, self._generator)

        def choose(inputs: PolicyInput, noise: Tensor, out: Any = None) -> Any:
            return agent.explore(inputs, noise, epsilon)

        for t in range(n_steps):
            action = batch.act(agent, choose, noise[t])
            rollout.action[t] = action
            step = batch.receive(agent, t, rollout.row(t))
            if step is not None:
                episodes += step.episodes
                rollout.finals += [(t, each) for each in step.finals]
                if step.is_reset is not None:
                    rollout.is_reset[t] = step.is_reset
        batch.end()
        return episodes + batch.ended_episodes()

    def _learn(self, learning_rate: float) -> Metrics:
        """All epochs over the rollout; returns the means of their gradient steps."""
        config, rollout, device = self.config, self._rollout, self.agent.device
        inputs = rollout.inputs()
        target = rollout.targets(inputs, gamma=config.gamma, td_lambda=config.td_lambda).flatten()
        action = torch.as_tensor(rollout.action).to(device).flatten()
        transitions = torch.from_numpy(np.flatnonzero(~rollout.is_reset))
        results = []
        for _ in range(config.n_epochs):
            order = torch.randperm(len(transitions), generator=self._order)
            for part in transitions[order].to(device).chunk(config.n_minibatches):
                chosen = inputs.mapped(partial(torch.index_select, dim=0, index=part), None)
                batch = PQNBatch(chosen, action[part], target[part])
                results.append(self.agent.update(batch, learning_rate))
        if not all(result.finite for result in results):
            raise NonFiniteError(
                "a loss or a gradient is not finite, and that step changed nothing. Try a smaller "
                f"agent.learning_rate than {config.learning_rate:g}"
            )
        loss, q, grad_norm, _ = np.array([[float(each) for each in row] for row in results]).T
        return {
            "loss/value": float(loss.mean()),
            "value/mean": float(q.mean()),
            "loss/grad_norm": float(grad_norm.mean()),
        }

    def _load_learnt(self, state: StateDict) -> None:
        """What learning changes."""
        self.agent.load_state_dict(state["agent"])
        self._order.set_state(state["order"])

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; None during an iteration, empty for tensor envs."""
        return None if self._state_before is not None else self._batch.snapshots()

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        restore_positions([self._batch], state["positions"], snapshots, self.agent)

    def state_dict(self) -> StateDict:
        """Saves the generator as it was before an interrupted iteration."""
        is_between = self._state_before is None
        return {
            "agent": self.agent.state_dict(),
            "generator": self._generator.get_state() if is_between else self._state_before,
            "order": self._order.get_state(),
            "n_steps": self._check.n_steps,
            "positions": saved_positions([self._batch]) if is_between else None,
            **self.episodes.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes: see ``resume_episodes``."""
        self._load_learnt(state)
        self._generator.set_state(state["generator"])
        self._check.n_steps = int(state["n_steps"])
        self.episodes.load_state_dict(state)


PQN = Algorithm(
    PQNConfig,
    PQNAgent,
    PQNTrainer,
    start_from=partial(load_parts, names=("spaces", "model")),
)
