"""DeviceEnvs: the ``EnvBatch`` of a tensor env; nothing leaves its device.

A program that is captured as a CUDA graph may take many steps. Between programs the positions of
the envs, their observations and the recurrent state of the policy stay at one address. Within one
they are passed from step to step, so that no step waits for a write of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import (
    MASK_KEY,
    DeviceVectorEnv,
    join_position,
    position_parts,
    with_ended,
)
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.masks import ActionMasks
from ml_pipeline.policy.observations import ObservationReader
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
        self._reader = reader = ObservationReader(env.single_observation_space)
        # What the envs show between programs; it has masks if the agent uses them, and episode
        # starts if it is recurrent.
        leaves = {
            name: torch.zeros(
                (env.num_envs, *reader.shapes[name]),
                dtype=torch_dtype(reader.dtypes[name]),
                device=env.device,
            )
            for name in reader.leaves
        }
        self._shown = Seen(leaves, None, None)
        # Three tensors: if one stood for all, the first step would be compiled by itself.
        self._none_ended = [torch.zeros(env.num_envs, device=env.device) for _ in range(3)]
        # Number, summed returns and summed lengths of the episodes that ended since ``begin``.
        self._totals = torch.zeros(3, device=env.device)
        self.memory: Tensor | None = None  # of a recurrent policy
        # What acting reads, if it is a program of its own:
        self._seen: Seen | None = None
        self._recalled: Tensor | None = None
        self._noise: Tensor | None = None
        self._programs_of: dict[Choose, Callable[[], PolicySample]] = {}
        # Within a program:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._shown
        self._carried: Tensor | None = None  # the recurrent state
        self._action: Any = None

    @property
    def can_be_captured(self) -> bool:
        return self.env.why_no_graph is None

    def begin(self, agent: Observer) -> bool:
        if self._step is None:
            to_env = agent.distribution.to_torch_env
            step = _new_step(self.env, self._reader, agent.masks, to_env)
            if self.env.why_no_graph is None:
                step = self._programs.compiled(step, f"a step of {type(self.env).__name__}")
            self._step = step
        self._totals.zero_()
        if self.has_started:
            return False
        obs, infos = self.env.reset(seed=self._seed)
        leaves = self._reader.split(obs)
        mask = agent.masks.on_device(leaves, infos.get(MASK_KEY))
        memory = agent.new_memory(self.env.num_envs)
        start = None if memory is None else torch.ones(len(memory), dtype=torch.bool)
        self._hold(Seen(leaves, mask, start), memory)
        return True

    def _hold(self, seen: Seen, memory: Tensor | None) -> None:
        """Keep what the next step reads where captured programs read and write it."""
        if seen.mask is not None and self._shown.mask is None:
            mask = torch.zeros_like(seen.mask, device=self.env.device)
            self._shown = self._shown._replace(mask=mask)
        if seen.episode_start is not None and self._shown.episode_start is None:
            start = torch.zeros_like(seen.episode_start, device=self.env.device)
            self._shown = self._shown._replace(episode_start=start)
        _write(seen, self._shown)
        if self.memory is None or memory is None:
            self.memory = memory
        else:
            self.memory.copy_(memory)
        for place, part in zip(self._held, position_parts(self.env.position), strict=True):
            place.copy_(part)
        self.env.position = join_position(self._held)
        self.has_started = True

    def seen(self) -> tuple[dict[str, Tensor], Tensor | None]:
        return self._shown.obs, self._shown.mask

    def show(self, seen: Seen | None = None) -> None:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._shown
        self._carried = self.memory
        if seen is not None:
            self._now = seen
            _write(self._shown, seen)

    def act(
        self, agent: Observer, choose: Choose, noise: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if self.can_be_captured:
            sample = choose(self._input(self._now, self._carried), noise, out=out)
            self._carried = sample.memory
            action: Tensor = sample.action if out is None else out
            self._action = action
            return action
        self._action, self._carried = self._act_alone(choose, noise)
        return self._action if out is None else out.copy_(self._action)

    def _act_alone(self, choose: Choose, noise: Tensor) -> PolicySample:
        """Act in a program of its own, because the steps before and after it have none."""
        if self._noise is None or self._seen is None:
            self._noise = noise.clone()
            copies = [each.clone() for each in _tensors(self._now)]
            self._seen = _like(self._now, copies)
            if self._carried is not None and self._now.episode_start is not None:
                self._seen = self._seen._replace(episode_start=self._now.episode_start.clone())
                self._recalled = self._carried.clone()
        _write(self._now, self._seen)
        if self._recalled is not None and self._carried is not None:
            self._recalled.copy_(self._carried)
        self._noise.copy_(noise)
        if choose not in self._programs_of:
            inputs = self._input(self._seen, self._recalled), self._noise

            def act() -> PolicySample:
                return choose(*inputs)

            self._programs_of[choose] = self._programs.captured(act, "acting")
        sample: PolicySample = self._programs_of[choose]()
        return sample

    def receive(self, agent: Observer, t: int, row: Row | None = None) -> EnvStep | None:
        places: list[Tensor | None] = []
        if row is not None and row.final_memory is not None and self._carried is not None:
            row.final_memory.copy_(self._carried)
        if row is not None and row.final is not None:
            self._now = row.following
            places = [*_tensors(row.following), row.reward, row.terminated, row.truncated]
            places += [*row.final.obs.values(), row.final.mask]
        self._parts, self._ended, results = self._step(
            self._parts, self._ended, self._action, places
        )
        if row is not None and places:
            if row.following.episode_start is not None:
                torch.logical_or(row.terminated, row.truncated, out=row.following.episode_start)
            return None
        n = len(_tensors(self._shown))
        reward, terminated, truncated = results[n : n + 3]
        self._now, final = _like(self._shown, results[:n]), _like(self._shown, results[n + 3 :])
        if self._carried is not None:
            self._now = self._now._replace(episode_start=terminated | truncated)
        return EnvStep(self._now.obs, self._now.mask, reward, terminated, truncated, final)

    def end(self) -> None:
        _write(self._now, self._shown)
        for place, part in zip(self._held, self._parts, strict=True):
            place.copy_(part)
        if self.memory is not None and self._carried is not None:
            self.memory.copy_(self._carried)
        self._totals += torch.stack(self._ended).sum(dim=1)

    def abandon(self) -> None:
        """Rows and positions may not match, so the next ``begin`` resets the envs."""
        self.has_started = False

    def inputs(self, agent: Observer) -> PolicyInput:
        return self._input(self._shown, self.memory)

    def _input(self, seen: Seen, memory: Tensor | None) -> PolicyInput:
        start = None if memory is None else seen.episode_start
        return PolicyInput(self._reader.joined(seen.obs), seen.mask, memory, start)

    def ended_episodes(self) -> list[Episode]:
        n, episode_return, length = self._totals.tolist()
        return [Episode(episode_return / n, length / n, int(n), {})] if n else []

    def resize(self, n_envs: int, agent: Observer) -> None:
        raise TypeError("tensor envs cannot change their number")

    def snapshots(self) -> list[bytes]:
        """Empty: the envs are part of ``state_dict``."""
        return []

    def state_dict(self) -> StateDict:
        # Copy on the CPU too: the next step overwrites it.
        leaves = {name: leaf.to("cpu", copy=True) for name, leaf in self._shown.obs.items()}
        mask, start = self._shown.mask, self._shown.episode_start
        recalled = {}
        if self.memory is not None and start is not None:
            recalled["state"] = self.memory.to("cpu", copy=True)
            recalled["episode_start"] = start.to("cpu", copy=True)
        return {
            "envs": self.env.state_dict(),
            "obs": self._reader.joined(leaves),
            "mask": None if mask is None else mask.to("cpu", copy=True),
            **recalled,
        }

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Nothing: the envs are part of ``state_dict``."""

    def resume_at(self, state: StateDict, agent: Observer) -> None:
        obs, mask = state["obs"], state.get("mask")  # older checkpoints have no masks
        if (mask is not None) != agent.masks.are_used:
            raise ValueError("agent.action_mask has changed")
        self.env.load_state_dict(state["envs"])
        memory, start = state.get("state"), state.get("episode_start")
        memory = None if memory is None else memory.to(agent.device)
        self._hold(Seen({"": obs} if self._reader.is_single else obs, mask, start), memory)


def _new_step(
    env: DeviceVectorEnv,
    reader: ObservationReader,
    masks: ActionMasks,
    to_env: Callable[[Tensor], Tensor],
) -> Any:
    """One step of all envs as a pure function of their positions, fused into a few kernels.

    Its results are what the envs show, reward, terminated, truncated, and what they showed before
    the autoreset. If there are ``places`` it writes them there, except where one is None, and they
    need not be stored twice.
    """

    def shown(obs: Any, given: Tensor | None) -> list[Tensor]:
        leaves = reader.split(obs)
        mask = masks.on_device(leaves, given)
        return [*leaves.values(), *([] if mask is None else [mask])]

    def step(
        parts: list[Tensor], ended: list[Tensor], action: Tensor, places: list[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        position, outcome = env.transition(join_position(parts), to_env(action))
        results = [
            *shown(outcome.obs, outcome.action_mask),
            *(outcome.reward, outcome.terminated, outcome.truncated),
            *shown(outcome.final_obs, outcome.final_mask),
        ]
        for place, result in zip(places, results, strict=False):
            if place is not None:
                place.copy_(result)
        return position_parts(position), with_ended(ended, outcome), [] if places else results

    return step


def _tensors(seen: Seen) -> list[Tensor]:
    return [*seen.obs.values(), *([] if seen.mask is None else [seen.mask])]


def _like(seen: Seen, tensors: list[Tensor]) -> Seen:
    """``tensors`` in the form of ``seen``."""
    leaves = dict(zip(seen.obs, tensors, strict=False))
    return Seen(leaves, None if seen.mask is None else tensors[-1], None)


def _write(source: Seen, place: Seen) -> None:
    for old, new in zip(_tensors(place), _tensors(source), strict=True):
        old.copy_(new)
    if place.episode_start is not None:
        place.episode_start.copy_(source.episode_start)
