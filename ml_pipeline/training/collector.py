"""Collector: plays a policy in many envs and writes what happened into a rollout buffer.

Over one vector env it acts and steps in turn. Over several it is double-buffered: while the envs
of one work, it acts in the next; each has its own columns of the buffer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.observations import ObservationError
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.train import PPOConfig
from ml_pipeline.envs.episode_stats import EpisodeStats
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Episode, PolicyInput, RolloutStats, StateDict
from ml_pipeline.training.gpu.acting import GpuActing
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.returns import RewardScaler
from ml_pipeline.training.rollout_buffer import FinalStep, RolloutBuffer


class BadValueError(UserError):
    """An env gave a number that is none, or one that is outside of its space."""


_Outcome = tuple["NDArray[Any]", "NDArray[np.bool_]", "NDArray[np.bool_]"]


class _Columns:
    """One vector env, the columns of the rollout that are its own, and where its envs stand."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], first: int, *, from_infos: bool, in_turns: bool
    ) -> None:
        """``in_turns``: its envs begin on the actions while others are waited for."""
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"the collector needs an env with autoreset_mode SAME_STEP, this one has {mode}; "
                "pass autoreset_mode=AutoresetMode.SAME_STEP to its constructor"
            )
        self.env = env
        self.place = slice(first, first + env.num_envs)
        self.stats = EpisodeStats(env.num_envs, from_infos=from_infos)
        self.leaves: dict[str, NDArray[Any]] = {}  # the observations to act on; none: not reset
        self.mask: NDArray[np.bool_] | None = None
        self.state: Tensor | None = None
        self.episode_start = np.ones(env.num_envs, dtype=bool)
        self.action: NDArray[Any] | None = None  # sent, and not yet answered
        self.acting: GpuActing | None = None  # where the policy is on a GPU
        self._in_turns = in_turns

    def reset(self, agent: PPOAgent, seed: int) -> None:
        obs, infos = self.env.reset(seed=seed)
        self.take(agent, obs, infos)
        self.state = agent.new_memory(self.env.num_envs)
        self.episode_start = np.ones(self.env.num_envs, dtype=bool)

    def send(self, action: NDArray[Any]) -> None:
        self.action = action
        if self._in_turns:
            self.env.step_async(action)  # type: ignore[attr-defined]

    def receive(self, agent: PPOAgent) -> tuple[_Outcome, dict[str, Any], list[Episode]]:
        """What the envs answered; they stand at their new observations."""
        result = self.env.step_wait() if self._in_turns else self.env.step(self.action)  # type: ignore[attr-defined]
        obs, reward, terminated, truncated, infos = result
        self.action = None
        self.episode_start = terminated | truncated
        self.take(agent, obs, infos)
        episodes = self.stats.step(reward, self.episode_start, infos)
        return (reward, terminated, truncated), infos, episodes

    def take(self, agent: PPOAgent, obs: Any, infos: Mapping[str, Any]) -> None:
        """Stand at new observations."""
        self.leaves = agent.reader.read(obs)
        self.mask = agent.mask_in(self.leaves, infos)

    def position(self) -> StateDict:
        return {
            "leaves": {name: torch.from_numpy(leaf) for name, leaf in self.leaves.items()},
            "mask": None if self.mask is None else torch.from_numpy(self.mask),
            "state": self.state,
            "episode_start": torch.from_numpy(self.episode_start),
            "stats": self.stats.state_dict(),
        }

    def resume_at(self, position: StateDict, agent: PPOAgent) -> None:
        mask, state = position["mask"], position["state"]
        self.leaves = {name: leaf.numpy() for name, leaf in position["leaves"].items()}
        self.mask = None if mask is None else mask.numpy()
        self.state = None if state is None else state.to(agent.device)
        self.episode_start = position["episode_start"].numpy()
        self.stats.load_state_dict(position["stats"])

    def inputs(self, agent: PPOAgent) -> PolicyInput:
        start = None
        if self.state is not None:
            start = torch.from_numpy(self.episode_start).to(agent.device)
        return agent.inputs(self.leaves, self.mask, self.state, start)


class Collector:
    """Rollouts of ``agent`` in ``envs``, whose columns follow one another."""

    is_interruptible = True

    def __init__(
        self,
        envs: Sequence[VectorEnv[Any, Any, Any]],
        *,
        env_seed: int,
        noise_seed: int,
        episodes_from_infos: bool = False,
        allow_nonfinite: bool = False,
        programs: Programs | None = None,
    ) -> None:
        """Env i is reset with ``env_seed + i`` before the first step.

        ``programs`` captures what is done on a GPU; None: nothing.
        ``episodes_from_infos``: see ``EpisodeStats``. ``allow_nonfinite``: play on with
        observations and rewards that are no numbers; else they are a ``BadValueError``.
        """
        self.n_envs = 0
        self._columns: list[_Columns] = []
        for env in envs:
            in_turns = len(envs) > 1
            columns = _Columns(env, self.n_envs, from_infos=episodes_from_infos, in_turns=in_turns)
            self._columns.append(columns)
            self.n_envs += env.num_envs
        self._env_seed = env_seed
        self._programs = programs
        self._allow_nonfinite = allow_nonfinite
        self._generator = torch.Generator().manual_seed(noise_seed)
        self._state_before: Tensor | None = None  # the generator's, while a rollout is under way
        self._n_steps = 0  # of each env, in whole rollouts

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [columns.env for columns in self._columns]

    @property
    def is_between_rollouts(self) -> bool:
        """Whether the envs stand where the last whole rollout has left them."""
        return self._state_before is None

    def new_buffer(self, n_steps: int, agent: PPOAgent) -> RolloutBuffer:
        return RolloutBuffer(n_steps, self.n_envs, agent)

    def new_scaler(self, config: PPOConfig) -> RewardScaler | None:
        if not config.scale_reward:
            return None
        return RewardScaler(self.n_envs, gamma=config.gamma, clip=config.clip_reward)

    def collect(self, agent: PPOAgent, buffer: RolloutBuffer) -> RolloutStats:
        """Fill ``buffer``; ``last_inputs`` is what the policy sees after its last row."""
        start = time.perf_counter()
        episodes: list[Episode] = []
        self._begin(agent, buffer)
        noise = agent.draw_noise(buffer.n_steps, self.n_envs, self._generator)
        for t in range(buffer.n_steps):
            for columns in self._columns:
                if t > 0:
                    episodes += self._receive(columns, t - 1, agent, buffer)
                row = agent.distribution.noise_row(t)
                self._act(columns, t, agent, buffer, noise[row, columns.place])
        for columns in self._columns:
            episodes += self._receive(columns, buffer.n_steps - 1, agent, buffer)
        return RolloutStats(episodes, time.perf_counter() - start)

    def commit(self, n_steps: int) -> None:
        """The rollout of ``n_steps`` was learned from: until then it may have been in vain."""
        self._state_before = None
        self._n_steps += n_steps

    def _begin(self, agent: PPOAgent, buffer: RolloutBuffer) -> None:
        for columns in self._columns:
            if columns.action is not None and len(self._columns) > 1:
                columns.receive(agent)  # of a rollout that was cut short
            columns.action = None
            if agent.device.type == "cuda" and columns.acting is None:
                programs = self._programs or Programs(agent.device)
                columns.acting = GpuActing(agent, columns.env.num_envs, programs)
            if not columns.leaves:
                columns.reset(agent, self._env_seed + columns.place.start)
                self._check_obs(columns, columns.leaves, 0)
        buffer.begin()
        if buffer.state is not None:
            states = [each.state for each in self._columns if each.state is not None]
            buffer.state = torch.cat(states)
        self._state_before = self._generator.get_state()

    def _act(
        self, columns: _Columns, t: int, agent: PPOAgent, buffer: RolloutBuffer, noise: Tensor
    ) -> None:
        """Choose actions and, if there is something to do meanwhile, let the envs begin."""
        leaves, mask, start = columns.leaves, columns.mask, columns.episode_start
        if columns.acting is not None:
            columns.acting.begin(leaves, mask, columns.state, start, noise)
            columns.state = columns.acting.state
            buffer.write_seen(t, columns.place, leaves, mask, start)  # while the device computes
            action = columns.acting.actions()
        else:
            sample = agent.sample_batch(columns.inputs(agent), noise)
            action = sample.action.cpu().numpy()
            columns.state = sample.state
            buffer.write_seen(t, columns.place, leaves, mask, start)
        buffer.action[t, columns.place] = action
        columns.send(agent.distribution.to_env(action))

    def _receive(
        self, columns: _Columns, t: int, agent: PPOAgent, buffer: RolloutBuffer
    ) -> list[Episode]:
        """Take in what the envs answered to the actions of row ``t``."""
        try:
            outcome, infos, episodes = columns.receive(agent)
        except ObservationError as error:
            env = columns.place.start + error.index
            raise BadValueError(f"{error}; env {env} gave it at {self._when(t + 1)}") from error
        reward, terminated, truncated = outcome
        buffer.write_outcome(t, columns.place, *outcome)
        self._check_reward(columns, reward, t)
        self._check_obs(columns, columns.leaves, t + 1)
        if truncated.any():
            for row in np.flatnonzero(truncated & ~terminated).tolist():
                self._keep_final(columns, row, t, agent, buffer, infos["final_obs"][row])
        return episodes

    def _keep_final(
        self,
        columns: _Columns,
        row: int,
        t: int,
        agent: PPOAgent,
        buffer: RolloutBuffer,
        final_obs: Any,
    ) -> None:
        leaves = agent.reader.read(final_obs)
        self._check_obs(columns, {k: v[np.newaxis] for k, v in leaves.items()}, t + 1, row)
        state = None if columns.state is None else columns.state[row].clone()
        buffer.final_steps.append(FinalStep(t, columns.place.start + row, leaves, state))

    def last_inputs(self, agent: PPOAgent) -> PolicyInput:
        """What the policy sees after the last row, in all envs."""
        if len(self._columns) == 1:
            return self._columns[0].inputs(agent)
        parts = [columns.inputs(agent) for columns in self._columns]
        leaves = {
            name: np.concatenate([columns.leaves[name] for columns in self._columns])
            for name in self._columns[0].leaves
        }
        joined = agent.inputs(leaves)
        if parts[0].state is None:
            return joined
        state = torch.cat([part.state for part in parts if part.state is not None])
        starts = [part.episode_start for part in parts if part.episode_start is not None]
        return joined._replace(state=state, episode_start=torch.cat(starts))

    def _check_reward(self, columns: _Columns, reward: NDArray[Any], t: int) -> None:
        # A sum of squares is the cheapest question; if it overflows, the numbers may be fine yet.
        if self._allow_nonfinite or math.isfinite(reward @ reward):
            return
        for row in np.flatnonzero(~np.isfinite(reward)).tolist():
            raise BadValueError(
                f"env {columns.place.start + row} gave the reward {reward[row]} at "
                f"{self._when(t + 1)}; nothing was learned from it, the last checkpoint is kept"
            )

    def _check_obs(
        self, columns: _Columns, leaves: dict[str, NDArray[Any]], t: int, first: int = 0
    ) -> None:
        if self._allow_nonfinite:
            return
        for name, leaf in leaves.items():
            if leaf.dtype != np.float32:
                continue
            flat = leaf.reshape(-1)
            if math.isfinite(flat @ flat):
                continue
            for row, *index in np.argwhere(~np.isfinite(leaf)).tolist():
                env, which = columns.place.start + first + row, f" {name!r}" if name else ""
                raise BadValueError(
                    f"env {env} gave an observation{which} that is not finite at "
                    f"{self._when(t)}: number {index} is {leaf[row][tuple(index)]}; nothing was "
                    "learned from it, the last checkpoint is kept"
                )

    def _when(self, t: int) -> str:
        return f"its step {self._n_steps + t:,} (step {t} of this rollout)"

    def resize(self, n_envs: int, agent: PPOAgent) -> None:
        """Between two rollouts; episodes in envs that stay go on."""
        columns = self._columns[0]
        if not isinstance(columns.env, ParallelEnv) or len(self._columns) > 1:
            raise TypeError("only a single ParallelEnv can change its number of envs")
        obs, infos = columns.env.resize(n_envs)
        n_new = max(n_envs - self.n_envs, 0)
        if columns.leaves:
            columns.leaves = agent.reader.read(obs)
            columns.mask = self._resized_mask(columns, infos, n_envs, agent)
        if columns.state is not None:
            new = columns.state.new_zeros(n_new, columns.state.shape[1])
            columns.state = torch.cat([columns.state, new])[:n_envs]
        starts = np.concatenate([columns.episode_start, np.ones(n_new, dtype=bool)])
        columns.episode_start = starts[:n_envs]
        columns.place = slice(0, n_envs)
        columns.acting = None
        columns.stats.resize(n_envs)
        self.n_envs = n_envs

    @staticmethod
    def _resized_mask(
        columns: _Columns, infos: Mapping[str, Any], n_envs: int, agent: PPOAgent
    ) -> NDArray[np.bool_] | None:
        if columns.mask is None or agent.config.action_mask != "info":
            return agent.mask_in(columns.leaves, infos)
        kept = columns.mask[:n_envs]
        if n_envs == len(kept):
            return kept
        # The infos of a resize are those of new envs; the others stand where they stood.
        given = agent.mask_of({"action_mask": infos.get("action_mask")})
        return None if given is None else np.concatenate([kept, given[len(kept) :]])

    def state_dict(self) -> StateDict:
        """The draws of a rollout that was cut short do not count."""
        state = self._generator.get_state() if self._state_before is None else self._state_before
        position = self._position() if self.is_between_rollouts else None
        return {"generator": state, "n_steps": self._n_steps, "position": position}

    def load_state_dict(self, state: StateDict) -> None:
        self._generator.set_state(state["generator"])
        self._n_steps = state["n_steps"]

    def _position(self) -> list[StateDict]:
        """Where the envs stand, seen from here; belongs to a snapshot of the envs themselves."""
        return [columns.position() for columns in self._columns]

    def _checked(self, position: list[StateDict] | None, agent: PPOAgent) -> list[StateDict]:
        """A position that this collector and agent can take up."""
        if not isinstance(position, list):
            raise ValueError("where its envs stood was not saved, or of envs of another kind")
        if len(position) != len(self._columns):
            raise ValueError("the collector is another one")
        for state in position:
            if (state["mask"] is not None) != agent.is_masked:
                raise ValueError("agent.action_mask has changed")
            if (state["state"] is not None) != bool(agent.state_size):
                raise ValueError("the network has changed")
        return position

    def snapshots(self) -> list[bytes]:
        """All envs as bytes."""
        return [each for env in self.envs for each in env.snapshot()]  # type: ignore[attr-defined]

    def resume_at(
        self, position: list[StateDict] | None, snapshots: Sequence[bytes], agent: PPOAgent
    ) -> None:
        """Go on in the midst of the episodes."""
        rest, states = list(snapshots), self._checked(position, agent)
        for env in self.envs:
            env.restore(rest[: env.num_envs])  # type: ignore[attr-defined]
            del rest[: env.num_envs]
        for columns, state in zip(self._columns, states, strict=True):
            columns.resume_at(state, agent)
