"""Columns: one vector env, its columns of the rollout, and its current observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode, EpisodeStats
from ml_pipeline.envs.vec_env import Resizable
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.masks import Mask
from ml_pipeline.policy.observation_input import array_input
from ml_pipeline.records import StateDict
from ml_pipeline.training.acting import GpuActing
from ml_pipeline.training.contracts import Observer


class Step(NamedTuple):
    """The results of one action in each env; [n_envs] each."""

    reward: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: dict[str, Any]
    episodes: list[Episode]  # those that ended


class Columns:
    """``place`` is a slice of columns; ``leaves`` are the current observations, empty at first."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        first: int,
        infos_have_episodes: bool,
        in_turns: bool,
    ) -> None:
        """``in_turns``: the envs step while the caller waits for another vector env."""
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode={mode}: the collector needs SAME_STEP; pass "
                "autoreset_mode=AutoresetMode.SAME_STEP to the env's constructor"
            )
        self.env: Any = env
        self.place = slice(first, first + env.num_envs)
        self.stats = EpisodeStats(env.num_envs, from_infos=infos_have_episodes)
        self.leaves: dict[str, NDArray[Any]] = {}
        self.mask: Mask | None = None
        self.memory: Tensor | None = None
        self.episode_start = np.ones(env.num_envs, dtype=bool)
        self.action: NDArray[Any] | None = None  # sent, and not yet answered
        self.acting: GpuActing | None = None  # for a policy on a GPU
        self._in_turns = in_turns

    def reset(self, agent: Observer, seed: int) -> None:
        obs, infos = self.env.reset(seed=seed)
        self._observe(agent, obs, infos)
        self.memory = agent.new_memory(self.env.num_envs)
        self.episode_start = np.ones(self.env.num_envs, dtype=bool)

    def send(self, action: NDArray[Any]) -> None:
        self.action = action
        if self._in_turns:
            self.env.step_async(action)

    def receive(self, agent: Observer) -> Step:
        """Wait for the envs and read their new observations."""
        result = self.env.step_wait() if self._in_turns else self.env.step(self.action)
        obs, reward, terminated, truncated, infos = result
        self.action = None
        self.episode_start = terminated | truncated
        self._observe(agent, obs, infos)
        episodes = self.stats.step(reward, self.episode_start, infos)
        return Step(reward, terminated, truncated, infos, episodes)

    def _observe(self, agent: Observer, obs: Any, infos: Mapping[str, Any]) -> None:
        self.leaves = agent.reader.read(obs)
        self.mask = agent.masks.in_step(self.leaves, infos)

    def inputs(self, agent: Observer) -> PolicyInput:
        """The policy's input: arrays if the agent takes them, else tensors on its device."""
        if agent.takes_arrays:
            return array_input(agent.reader, self.leaves, self.mask)
        start = None
        if self.memory is not None:
            start = torch.from_numpy(self.episode_start).to(agent.device)
        return agent.inputs(self.leaves, self.mask, self.memory, start)

    def resize(self, n_envs: int, agent: Observer) -> None:
        """Call between two rollouts; remaining envs keep their episodes."""
        if not isinstance(self.env, Resizable):
            raise TypeError(f"{type(self.env).__name__} cannot change its number of envs")
        obs, infos = self.env.resize(n_envs)
        n_new = max(n_envs - len(self.episode_start), 0)
        if self.leaves:
            self.leaves = agent.reader.read(obs)
            self.mask = self._resized_mask(infos, n_envs, agent)
        if self.memory is not None:
            new = self.memory.new_zeros(n_new, self.memory.shape[1])
            self.memory = torch.cat([self.memory, new])[:n_envs]
        starts = np.concatenate([self.episode_start, np.ones(n_new, dtype=bool)])
        self.episode_start = starts[:n_envs]
        self.place = slice(0, n_envs)
        self.acting = None
        self.stats.resize(n_envs)

    def _resized_mask(self, infos: Mapping[str, Any], n_envs: int, agent: Observer) -> Mask | None:
        if self.mask is None or not agent.masks.in_infos:
            return agent.masks.in_step(self.leaves, infos)
        kept = self.mask[:n_envs]
        if n_envs == len(kept):
            return kept
        # The infos of a resize hold the masks of new envs only.
        given = agent.masks.of_infos({"action_mask": infos.get("action_mask")})
        return None if given is None else np.concatenate([kept, given[len(kept) :]])

    def state_dict(self) -> StateDict:
        """The current step of the envs; resuming also needs snapshots of the envs themselves."""
        return {
            "leaves": {name: torch.from_numpy(leaf) for name, leaf in self.leaves.items()},
            "mask": None if self.mask is None else torch.from_numpy(self.mask),
            "state": self.memory,  # the name that older checkpoints use
            "episode_start": torch.from_numpy(self.episode_start),
            "stats": self.stats.state_dict(),
        }

    def load_state_dict(self, state: StateDict, agent: Observer) -> None:
        mask, memory = state["mask"], state["state"]
        self.leaves = {name: leaf.numpy() for name, leaf in state["leaves"].items()}
        self.mask = None if mask is None else mask.numpy()
        self.memory = None if memory is None else memory.to(agent.device)
        self.episode_start = state["episode_start"].numpy()
        self.stats.load_state_dict(state["stats"])


def joined_inputs(all_columns: Sequence[Columns], agent: Observer) -> PolicyInput:
    """The policy's current input, in the envs of all columns."""
    if len(all_columns) == 1:
        return all_columns[0].inputs(agent)
    parts = [columns.inputs(agent) for columns in all_columns]
    leaves = {
        name: np.concatenate([columns.leaves[name] for columns in all_columns])
        for name in all_columns[0].leaves
    }
    joined = agent.inputs(leaves)
    if parts[0].memory is None:
        return joined
    memory = torch.cat([part.memory for part in parts if part.memory is not None])
    starts = [part.episode_start for part in parts if part.episode_start is not None]
    return joined._replace(memory=memory, episode_start=torch.cat(starts))


def restore_columns(
    all_columns: Sequence[Columns],
    positions: list[StateDict] | None,
    snapshots: Sequence[bytes],
    agent: Observer,
) -> None:
    """Continue at saved positions; ``ValueError`` if they do not fit these columns and agent."""
    if not isinstance(positions, list):
        raise ValueError("the checkpoint holds no env positions, or those of another kind of env")
    if len(positions) != len(all_columns):
        raise ValueError("the collector setting has changed")
    for position in positions:
        if (position["mask"] is not None) != agent.masks.are_used:
            raise ValueError("agent.action_mask has changed")
        if (position["state"] is not None) != bool(agent.memory_size):
            raise ValueError("the network has changed")
    rest = list(snapshots)
    for columns in all_columns:
        columns.env.restore(rest[: columns.env.num_envs])
        del rest[: columns.env.num_envs]
    for columns, position in zip(all_columns, positions, strict=True):
        columns.load_state_dict(position, agent)
