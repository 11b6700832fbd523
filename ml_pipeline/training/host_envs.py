"""HostEnvs: the ``EnvBatch`` of a vector env with arrays, in this process or in workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode, EpisodeStats
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.envs.vec_env import Resizable
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.masks import Mask
from ml_pipeline.policy.observations import ObservationError
from ml_pipeline.records import StateDict
from ml_pipeline.training.acting import GpuActing
from ml_pipeline.training.checks import BadValueError
from ml_pipeline.training.contracts import Observer
from ml_pipeline.training.env_batch import Choose, EnvStep, FinalObservation, Row, Seen
from ml_pipeline.training.graphs import Programs


class HostEnvs:
    """``leaves`` are the current observations; empty before the first reset."""

    on_host = True
    can_be_captured = False

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        first: int,
        seed: int,
        check: FiniteCheck,
        infos_have_episodes: bool,
        in_background: bool,
        programs: Programs | None = None,
    ) -> None:
        """Env i has column ``first + i``, and is reset with ``seed + i``.

        ``in_background``: the envs step while the caller does other work.
        """
        mode = env.metadata.get("autoreset_mode")
        self.has_reset_rows = isinstance(env, ForeignVectorEnv) and env.has_reset_rows
        if mode is not AutoresetMode.SAME_STEP and not self.has_reset_rows:
            raise ValueError(
                f"autoreset_mode={mode}: the collector needs SAME_STEP; pass "
                "autoreset_mode=AutoresetMode.SAME_STEP to the env's constructor, or wrap the env "
                "in ForeignVectorEnv"
            )
        self.env: Any = env
        self.place = slice(first, first + env.num_envs)
        self.leaves: dict[str, NDArray[Any]] = {}
        self.mask: Mask | None = None
        self.memory: Tensor | None = None
        self.episode_start = np.ones(env.num_envs, dtype=bool)
        self._needs_reset = np.zeros(env.num_envs, dtype=bool)  # which the next step does
        self._seed = seed
        self._check = check
        self._infos_have_episodes = infos_have_episodes
        self._stats = EpisodeStats(env.num_envs, from_infos=infos_have_episodes)
        self._is_calling = False  # the envs; an interrupt then loses their step
        self._action: Any = None  # sent, and not yet answered
        self._in_background = in_background
        self._programs = programs
        self._is_policy_on_gpu = False
        self._acting: GpuActing | None = None  # for a policy on a GPU

    @property
    def has_started(self) -> bool:
        return bool(self.leaves)

    def begin(self, agent: Observer) -> bool:
        if self._action is not None and self._in_background:
            self._answer(agent)  # discards a step of an interrupted rollout
        self._action = None
        self._is_policy_on_gpu = agent.device.type == "cuda"
        if self.has_started:
            return False
        obs, infos = self.env.reset(seed=self._seed)
        self._observe(agent, obs, infos)
        self.memory = agent.new_memory(self.env.num_envs)
        self.episode_start = np.ones(self.env.num_envs, dtype=bool)
        self._needs_reset = np.zeros(self.env.num_envs, dtype=bool)
        self._check.obs(self.leaves, first_env=self.place.start, t=0)
        return True

    def seen(self) -> tuple[dict[str, NDArray[Any]], Mask | None]:
        return self.leaves, self.mask

    def show(self, seen: Seen | None = None) -> None:
        if seen is None:
            return
        for name, leaf in self.leaves.items():
            seen.obs[name][...] = leaf
        if seen.mask is not None:
            seen.mask[...] = self.mask
        if seen.episode_start is not None:
            seen.episode_start[...] = self.episode_start

    def act(
        self, agent: Observer, choose: Choose, noise: Any, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        action: NDArray[Any]
        if self._is_policy_on_gpu:
            action = self._act_on_gpu(agent, choose, noise)
        else:
            sample = choose(self.inputs(agent), noise)
            chosen: Any = sample.action
            action = chosen if agent.takes_arrays else chosen.cpu().numpy()
            self.memory = sample.memory
        if out is not None:
            out[...] = action
        self._action = agent.distribution.to_env(action)
        if self._in_background:
            self._is_calling = True
            self.env.step_async(self._action)
            self._is_calling = False
        return action

    def _act_on_gpu(self, agent: Observer, choose: Choose, noise: Tensor) -> NDArray[Any]:
        if self._acting is None:
            programs = self._programs or Programs(agent.device)
            self._acting = GpuActing(agent, self.env.num_envs, programs)
        action = self._acting.actions(
            choose, self.leaves, self.mask, self.memory, self.episode_start, noise
        )
        self.memory = self._acting.memory
        return action

    def receive(self, agent: Observer, t: int, row: Row | None = None) -> EnvStep:
        first = self.place.start
        is_reset = self._needs_reset if self.has_reset_rows else None
        try:
            reward, terminated, truncated, infos, episodes = self._answer(agent)
        except ObservationError as error:
            env, when = first + error.index, self._check.when(t + 1)
            raise BadValueError(f"env {env}, at {when}: {error}") from error
        if row is not None:
            row.reward[...] = reward
            row.terminated[...] = terminated
            row.truncated[...] = truncated
            self.show(row.following)
        self._check.reward(reward, first_env=first, t=t)
        self._check.obs(self.leaves, first_env=first, t=t + 1)
        finals: list[FinalObservation] = []
        if np.count_nonzero(truncated):  # far faster than any()
            cut = np.flatnonzero(truncated & ~terminated).tolist()
            finals = [self._final(agent, infos, env, t) for env in cut]
        return EnvStep(
            self.leaves,
            self.mask,
            reward,
            terminated,
            truncated,
            finals=finals,
            episodes=episodes,
            is_reset=is_reset,
        )

    def _answer(self, agent: Observer) -> tuple[Any, Any, Any, dict[str, Any], list[Episode]]:
        """Wait for the envs, read their new observations and count their episodes."""
        self._is_calling = True
        result = self.env.step_wait() if self._in_background else self.env.step(self._action)
        self._is_calling = False
        obs, reward, terminated, truncated, infos = result
        self._action = None
        done = terminated | truncated
        self.episode_start = done
        self._observe(agent, obs, infos)
        if self.has_reset_rows:
            reward = np.where(self._needs_reset, 0.0, reward)
            episodes = self._stats.step(reward, done, infos, ~self._needs_reset)
            self._needs_reset = done
        else:
            episodes = self._stats.step(reward, done, infos)
        return reward, terminated, truncated, infos, episodes

    def _observe(self, agent: Observer, obs: Any, infos: Mapping[str, Any]) -> None:
        self.leaves = agent.reader.read(obs)
        if agent.masks.are_used:
            self.mask = agent.masks.in_step(self.leaves, infos)

    def _final(
        self, agent: Observer, infos: Mapping[str, Any], env: int, t: int
    ) -> FinalObservation:
        leaves = agent.reader.read(infos["final_obs"][env])
        one = {name: leaf[np.newaxis] for name, leaf in leaves.items()}
        self._check.obs(one, first_env=self.place.start + env, t=t + 1)
        mask = agent.masks.of_final(leaves, infos, env)
        memory = None if self.memory is None else self.memory[env].clone()
        return FinalObservation(env, leaves, mask, memory)

    def end(self) -> None:
        """Nothing: every step has left the envs at its end."""

    def abandon(self) -> None:
        """``begin`` discards a step that was not received, or resets envs that have lost theirs."""
        if self._is_calling:
            self._is_calling = False
            self._action = None
            self.leaves = {}
            self._stats = EpisodeStats(self.env.num_envs, from_infos=self._infos_have_episodes)

    def inputs(self, agent: Observer) -> PolicyInput:
        """Arrays if the agent takes them, else tensors on its device."""
        if agent.takes_arrays:
            obs: Any = self.leaves[""] if agent.reader.is_single else self.leaves
            mask: Any = self.mask
            starts: Any = None if self.memory is None else self.episode_start
            return PolicyInput(obs, mask, self.memory, starts)
        start = None
        if self.memory is not None:
            start = torch.from_numpy(self.episode_start).to(agent.device)
        return agent.inputs(self.leaves, self.mask, self.memory, start)

    def ended_episodes(self) -> list[Episode]:
        """None: each ``EnvStep`` has its own."""
        return []

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
        self._acting = None
        self._stats.resize(n_envs)

    def _resized_mask(self, infos: Mapping[str, Any], n_envs: int, agent: Observer) -> Mask | None:
        if self.mask is None or not agent.masks.in_infos:
            return agent.masks.in_step(self.leaves, infos)
        kept = self.mask[:n_envs]
        if n_envs == len(kept):
            return kept
        # The infos of a resize hold the masks of new envs only.
        given = agent.masks.of_infos({"action_mask": infos.get("action_mask")})
        return None if given is None else np.concatenate([kept, given[len(kept) :]])

    def snapshots(self) -> list[bytes]:
        return list(self.env.snapshot())

    def state_dict(self) -> StateDict:
        """The current step of the envs; resuming also needs snapshots of the envs themselves."""
        return {
            "leaves": {name: torch.from_numpy(leaf) for name, leaf in self.leaves.items()},
            "mask": None if self.mask is None else torch.from_numpy(self.mask),
            "state": self.memory,  # the name that older checkpoints use
            "episode_start": torch.from_numpy(self.episode_start),
            "stats": self._stats.state_dict(),
        }

    def restore(self, snapshots: Sequence[bytes]) -> None:
        self.env.restore(snapshots)

    def resume_at(self, state: StateDict, agent: Observer) -> None:
        mask, memory = state["mask"], state["state"]
        self.leaves = {name: leaf.numpy() for name, leaf in state["leaves"].items()}
        self.mask = None if mask is None else mask.numpy()
        self.memory = None if memory is None else memory.to(agent.device)
        self.episode_start = state["episode_start"].numpy()
        self._stats.load_state_dict(state["stats"])


class FiniteCheck:
    """Finds NaN and infinity in the observations and rewards of a rollout."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.n_steps = 0  # of each env, in complete rollouts

    def reward(self, reward: NDArray[Any], *, first_env: int, t: int) -> None:
        # One dot product is the cheapest test. If it overflows, the rewards may still be finite.
        if not self.enabled or math.isfinite(reward.dot(reward)):
            return
        for row in np.flatnonzero(~np.isfinite(reward)).tolist():
            raise BadValueError(
                f"env {first_env + row} returned the reward {reward[row]} at {self.when(t + 1)}; "
                "nothing was learned from it"
            )

    def obs(self, leaves: Mapping[str, NDArray[Any]], *, first_env: int, t: int) -> None:
        if not self.enabled:
            return
        for name, leaf in leaves.items():
            if leaf.dtype != np.float32:
                continue
            flat = leaf.reshape(-1)
            if math.isfinite(flat.dot(flat)):
                continue
            for row, *index in np.argwhere(~np.isfinite(leaf)).tolist():
                which = f" {name!r}" if name else ""
                raise BadValueError(
                    f"env {first_env + row} returned an observation{which} that is not finite at "
                    f"{self.when(t)}: entry {index} is {leaf[row][tuple(index)]}; nothing was "
                    "learned from it"
                )

    def when(self, t: int) -> str:
        return f"its step {self.n_steps + t:,} (step {t} of this rollout)"
