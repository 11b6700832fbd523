"""OffPolicyTrainer: one iteration of DQN or SAC. The agent learns from replay while envs step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.agents.observations import ObservationError
from ml_pipeline.config.off_policy import OffPolicyConfig
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.protocols import (
    Envs,
    Episode,
    Metrics,
    Place,
    PolicyInput,
    PolicySample,
    StateDict,
)
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.checks import BadValueError, FiniteCheck, TrainingError
from ml_pipeline.training.columns import Columns, Step, restore_columns
from ml_pipeline.training.contracts import ReplayAgent
from ml_pipeline.training.episode_window import EpisodeWindow
from ml_pipeline.training.final_observations import FinalObservation
from ml_pipeline.training.replay_buffer import ReplayBuffer
from ml_pipeline.training.schedules import annealed


class OffPolicyTrainer:
    """Trains ``agent`` in one vector env."""

    def __init__(
        self,
        agent: ReplayAgent,
        envs: Envs,
        config: OffPolicyConfig,
        place: Place,
        *,
        priority_exponent: float = 0.0,
    ) -> None:
        self.agent = agent
        self.config = config
        self.progress = 0.0  # through the run, for the schedules
        self.episodes = EpisodeWindow()
        (env,) = envs.parts
        self._columns = Columns(env, 0, envs.infos_have_episodes, in_turns=True)
        self._env_seed = envs.first_seed
        self._check = FiniteCheck(enabled=True)
        self.replay = ReplayBuffer(
            int(config.buffer_size),
            env.num_envs,
            agent.reader,
            agent.distribution,
            n_step=config.n_step,
            gamma=config.gamma,
            device=place.device,
            has_masks=agent.masks.are_used,
            priority_exponent=priority_exponent,
            stacked_frames=config.stacked_frames,
        )
        self.n_updates = 0
        self._noise = torch.Generator().manual_seed(stream_seed(place.seed, "actions"))
        self._draws = torch.Generator(place.device).manual_seed(
            stream_seed(place.seed, "minibatches")
        )
        self._is_complete = True  # no iteration is half done

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [self._columns.env]

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.replay.n_envs)

    @property
    def _env_steps(self) -> int:
        return self.replay.n_written * self.replay.n_envs

    def train_episode_vectorized(self, hold: Callable[[], None] = lambda: None) -> Metrics:
        """One iteration: ``iteration_length`` steps of each env, and the updates that are due."""
        hold()  # the agent learns from the first step on, so the iteration cannot be undone
        start, n_before = time.perf_counter(), self.n_updates
        learn_seconds = 0.0
        self._is_complete = False
        config, columns, agent = self.config, self._columns, self.agent
        learning_rate = annealed(config.learning_rate, config.learning_rate_schedule, self.progress)
        rates = agent.rates(self.progress, learning_rate)
        if not columns.leaves:
            columns.reset(agent, self._env_seed)
            self._check.obs(columns.leaves, first_env=0, t=0)
            self.replay.end_episodes()
            self.replay.begin(columns.leaves, columns.mask)
        n_steps = config.iteration_length
        noise = agent.draw_noise(n_steps, self.replay.n_envs, self._noise)
        episodes: list[Episode] = []
        results: list[Any] = []
        for t in range(n_steps):
            action = self._act(columns.inputs(agent), noise[t], rates)
            columns.send(agent.distribution.to_env(action.cpu().numpy()))
            learn_start = time.perf_counter()
            results += self._learn(rates)  # while the envs step
            learn_seconds += time.perf_counter() - learn_start
            episodes += self._receive(t, action)
        self._check.n_steps += n_steps
        self._is_complete = True
        seconds = time.perf_counter() - start
        return {
            "n_envs": self.replay.n_envs,
            **self.episodes.add(episodes),
            **self._means(results),
            "policy/learning_rate": learning_rate,
            **({"policy/epsilon": rates.epsilon} if hasattr(rates, "epsilon") else {}),
            "replay/size": float(len(self.replay)),
            "time/updates_per_env_step": (self.n_updates - n_before) / self.iteration_steps,
            "time/updates_per_second": (self.n_updates - n_before) / seconds,
            "time/collect_seconds": seconds - learn_seconds,
        }

    def _act(self, inputs: PolicyInput, noise: Tensor, rates: Any) -> Tensor:
        is_random = self._env_steps < self.config.learning_starts
        sample: PolicySample = self.agent.explore(inputs, noise, rates, is_random=is_random)
        return sample.action

    def _learn(self, rates: Any) -> list[Any]:
        """The updates that are due after the env steps so far."""
        config = self.config
        learned_from = self._env_steps - int(config.learning_starts)
        due = int(config.updates_per_env_step * max(learned_from, 0)) - self.n_updates
        results = []
        for _ in range(due if len(self.replay) else 0):
            uniform = torch.rand(
                config.batch_size, generator=self._draws, device=self.replay.device
            )
            batch, index = self.replay.sample(uniform, beta=getattr(rates, "beta", 1.0))
            result = self.agent.update(batch, rates)
            if hasattr(result, "error"):
                self.replay.prioritise(index, result.error)
            self.n_updates += 1
            results.append(result)
        return results

    def _receive(self, t: int, action: Tensor) -> list[Episode]:
        """Write the results of one step; returns the episodes that ended."""
        columns, agent = self._columns, self.agent
        try:
            step = columns.receive(agent)
        except ObservationError as error:
            when = self._check.when(t + 1)
            raise BadValueError(f"env {error.index}, at {when}: {error}") from error
        self._check.reward(step.reward, first_env=0, t=t)
        self._check.obs(columns.leaves, first_env=0, t=t + 1)
        self.replay.write(
            action,
            step.reward,
            step.terminated,
            step.truncated,
            columns.leaves,
            columns.mask,
            self._finals(step, t),
        )
        if self.config.normalize_obs:
            agent.learn_moments(agent.reader.to_tensors(columns.leaves, agent.device))
        return step.episodes

    def _finals(self, step: Step, t: int) -> list[FinalObservation]:
        finals = []
        if step.truncated.any():
            for env in np.flatnonzero(step.truncated & ~step.terminated).tolist():
                leaves = self.agent.reader.read(step.infos["final_obs"][env])
                one = {name: leaf[np.newaxis] for name, leaf in leaves.items()}
                self._check.obs(one, first_env=env, t=t + 1)
                mask = self._final_mask(leaves, step.infos, env)
                finals.append(FinalObservation(env, leaves, mask))
        return finals

    def _final_mask(self, leaves: dict[str, Any], infos: dict[str, Any], env: int) -> Any:
        masks = self.agent.masks
        if masks.leaf is not None:
            return leaves[masks.leaf] != 0
        final = infos.get("final_info", {}) if masks.in_infos else {}
        given = final.get("action_mask")
        return None if given is None else np.asarray(given[env], dtype=bool)

    def _means(self, results: Sequence[Any]) -> Metrics:
        if not results:
            return {}
        if not all(bool(result.finite) for result in results):
            raise TrainingError(
                "a loss or a gradient is not finite, and that step changed nothing. Try a smaller "
                "agent.learning_rate, and look for huge observations or rewards "
                "(agent.normalize_obs)"
            )
        names = self.agent.metric_names
        table = torch.stack([torch.stack([getattr(r, n) for n in names]) for r in results])
        means = table.mean(dim=0).cpu().tolist()
        return {names[name]: mean for name, mean in zip(names, means, strict=True)}

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; None during an iteration."""
        return list(self._columns.env.snapshot()) if self._is_complete else None

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        restore_columns([self._columns], state["positions"], snapshots, self.agent)
        self.replay.begin(self._columns.leaves, self._columns.mask)

    def state_dict(self) -> StateDict:
        positions = [self._columns.state_dict()] if self._is_complete else None
        return {
            "agent": self.agent.state_dict(),
            "replay": self.replay.state_dict(),
            "n_updates": self.n_updates,
            "n_steps": self._check.n_steps,
            "noise_generator": self._noise.get_state(),
            "draw_generator": self._draws.get_state(),
            "positions": positions,
            **self.episodes.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes and the transitions."""
        self.agent.load_state_dict(state["agent"])
        load_position(self.replay, state)
        self.n_updates = state["n_updates"]
        self._check.n_steps = state["n_steps"]
        self._noise.set_state(state["noise_generator"])
        self._draws.set_state(state["draw_generator"])
        self.episodes.load_state_dict(state)


def load_position(replay: ReplayBuffer, state: StateDict) -> None:
    """Everything of a buffer except the transitions: its counters and current observations."""
    replay.load_state_dict(state["replay"])
    if state["positions"] is None:
        replay.forget_newest()  # stopped during an iteration
    elif state["positions"][0]["leaves"]:
        position = state["positions"][0]
        leaves = {name: leaf.numpy() for name, leaf in position["leaves"].items()}
        mask = position["mask"]
        replay.begin(leaves, None if mask is None else mask.numpy())


def check_envs(envs: Envs) -> None:
    """Refuse envs that replay does not support."""
    if len(envs.parts) > 1:
        raise TrainingError("collector=double: replay learns while envs step; use collector=sync")
    if isinstance(envs.parts[0], TorchVectorEnv):
        raise TrainingError("tensor envs: replay supports envs in processes only")
