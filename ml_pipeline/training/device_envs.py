"""DeviceEnvs: the ``EnvBatch`` of a tensor env; nothing leaves its device.

A program that is captured as a CUDA graph may take many steps. Between programs the positions of
the envs, their observations and the recurrent state of the policy stay at one address. Within one
they are passed from step to step, so that no step waits for a write of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import DeviceVectorEnv, join_position, position_parts, with_ended
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Observer
from ml_pipeline.training.env_batch import Choose, EnvStep, Row, Seen, torch_dtype
from ml_pipeline.training.graphs import Programs


class DeviceEnvs:
    """Env i of ``env`` is reset with ``seed + i``."""

    on_host = False
    has_reset_rows = False

    def __init__(
        self, env: DeviceVectorEnv, *, seed: int, programs: Programs | None = None
    ) -> None:
        self.env: Any = env
        self.place = slice(0, env.num_envs)
        self.has_started = False
        self._seed = seed
        self._programs = programs or Programs(env.device)
        self._step: Any = None
        self._held = [part.clone() for part in position_parts(env.position)]
        space = env.observation_space
        dtype = torch_dtype(np.dtype(space.dtype))
        self._obs = torch.zeros(space.shape or (), dtype=dtype, device=env.device)
        # Three tensors: if one stood for all, the first step would be compiled by itself.
        self._none_ended = [torch.zeros(env.num_envs, device=env.device) for _ in range(3)]
        # Number, summed returns and summed lengths of the episodes that ended since ``begin``.
        self._totals = torch.zeros(3, device=env.device)
        self.memory: Tensor | None = None  # of a recurrent policy, from the first ``begin`` on
        self._start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        # What acting reads, if it is a program of its own:
        self._read: list[Tensor] = []
        self._programs_of: dict[Choose, Callable[[], PolicySample]] = {}
        # Within a program:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._obs
        self._carried: Tensor | None = None  # the recurrent state
        self._starts = self._start
        self._action = self._obs

    @property
    def can_be_captured(self) -> bool:
        return self.env.why_no_graph is None

    def begin(self, agent: Observer) -> bool:
        if self._step is None:
            step = _new_step(self.env, agent.distribution.to_torch_env)
            if self.env.why_no_graph is None:
                step = self._programs.compiled(step, f"a step of {type(self.env).__name__}")
            self._step = step
        self._totals.zero_()
        if self.has_started:
            return False
        obs, _ = self.env.reset(seed=self._seed)
        n_envs = self.env.num_envs
        self._hold(obs, agent.new_memory(n_envs), torch.ones(n_envs, dtype=torch.bool))
        return True

    def _hold(self, obs: Tensor, memory: Tensor | None, start: Tensor) -> None:
        """Keep what the next step reads at the address that captured programs read and write."""
        self._obs.copy_(obs)
        self._start.copy_(start)
        if self.memory is None or memory is None:
            self.memory = memory
        else:
            self.memory.copy_(memory)
        for place, part in zip(self._held, position_parts(self.env.position), strict=True):
            place.copy_(part)
        self.env.position = join_position(self._held)
        self.has_started = True

    def seen(self) -> tuple[dict[str, Tensor], None]:
        return {"": self._obs}, None

    def show(self, seen: Seen | None = None) -> None:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._obs
        self._carried, self._starts = self.memory, self._start
        if seen is not None:
            self._now = seen.obs[""]
            self._now.copy_(self._obs)
            if seen.episode_start is not None:
                self._starts = seen.episode_start
                self._starts.copy_(self._start)

    def act(
        self, agent: Observer, choose: Choose, noise: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if self.can_be_captured:
            inputs = _inputs(self._now, self._carried, self._starts)
            sample = choose(inputs, noise, out=out)
            self._carried = sample.memory
            self._action = sample.action if out is None else out
            return self._action
        self._action, self._carried = self._act_alone(choose, noise)
        return self._action if out is None else out.copy_(self._action)

    def _act_alone(self, choose: Choose, noise: Tensor) -> PolicySample:
        """Act in a program of its own, because the steps before and after it have none."""
        read = [noise, self._now, self._starts]
        read += [] if self._carried is None else [self._carried]
        if not self._read:
            self._read = [each.clone() for each in read]
        for place, each in zip(self._read, read, strict=True):
            place.copy_(each)
        if choose not in self._programs_of:
            held_noise, obs, start, *memory = self._read
            inputs = _inputs(obs, memory[0] if memory else None, start)

            def act() -> PolicySample:
                return choose(inputs, held_noise)

            self._programs_of[choose] = self._programs.captured(act, "acting")
        sample: PolicySample = self._programs_of[choose]()
        return sample

    def receive(self, agent: Observer, t: int, row: Row | None = None) -> EnvStep | None:
        places: list[Tensor] = []
        if row is not None and row.final_memory is not None and self._carried is not None:
            row.final_memory.copy_(self._carried)
        if row is not None and row.final_obs is not None:
            self._now = row.following.obs[""]
            places = [self._now, row.reward, row.terminated, row.truncated, row.final_obs]
        self._parts, self._ended, results = self._step(
            self._parts, self._ended, self._action, places
        )
        if row is not None and places:
            if row.following.episode_start is not None:
                self._starts = row.following.episode_start
                torch.logical_or(row.terminated, row.truncated, out=self._starts)
            return None
        self._now, reward, terminated, truncated, final_obs = results
        if self._carried is not None:
            self._starts = terminated | truncated
        return EnvStep({"": self._now}, None, reward, terminated, truncated, final_obs)

    def end(self) -> None:
        for place, part in zip([*self._held, self._obs], [*self._parts, self._now], strict=True):
            place.copy_(part)
        if self.memory is not None and self._carried is not None:
            self.memory.copy_(self._carried)
            self._start.copy_(self._starts)
        self._totals += torch.stack(self._ended).sum(dim=1)

    def abandon(self) -> None:
        """Rows and positions may not match, so the next ``begin`` resets the envs."""
        self.has_started = False

    def inputs(self, agent: Observer) -> PolicyInput:
        return _inputs(self._obs, self.memory, self._start)

    def ended_episodes(self) -> list[Episode]:
        n, episode_return, length = self._totals.tolist()
        return [Episode(episode_return / n, length / n, int(n), {})] if n else []

    def resize(self, n_envs: int, agent: Observer) -> None:
        raise TypeError("tensor envs cannot change their number")

    def snapshots(self) -> list[bytes]:
        """Empty: the envs are part of ``state_dict``."""
        return []

    def state_dict(self) -> StateDict:
        saved = {"obs": self._obs}
        if self.memory is not None:
            saved |= {"state": self.memory, "episode_start": self._start}
        # Copy on the CPU too: the next step overwrites it.
        copies = {name: each.to("cpu", copy=True) for name, each in saved.items()}
        return {"envs": self.env.state_dict(), **copies}

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Nothing: the envs are part of ``state_dict``."""

    def resume_at(self, state: StateDict, agent: Observer) -> None:
        self.env.load_state_dict(state["envs"])
        memory, start = state.get("state"), state.get("episode_start", self._start)
        self._hold(state["obs"], None if memory is None else memory.to(agent.device), start)


def _inputs(obs: Tensor, memory: Tensor | None, start: Tensor) -> PolicyInput:
    """What a policy reads in a step; ``start`` says where it resets its memory."""
    return PolicyInput(obs, None, memory, None if memory is None else start)


def _new_step(env: DeviceVectorEnv, to_env: Callable[[Tensor], Tensor]) -> Any:
    """One step of all envs as a pure function of their positions, fused into a few kernels.

    If there are ``places`` it writes the results there, and they need not be stored twice.
    """

    def step(
        parts: list[Tensor], ended: list[Tensor], action: Tensor, places: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        position, outcome = env.transition(join_position(parts), to_env(action))
        results = list(outcome[:5])  # obs, reward, terminated, truncated, final_obs
        for place, result in zip(places, results, strict=False):
            place.copy_(result)
        return position_parts(position), with_ended(ended, outcome), [] if places else results

    return step
