"""DeviceEnvs: the ``EnvBatch`` of a tensor env; nothing leaves its device.

A program that is captured as a CUDA graph may take many steps. Between programs the positions of
the envs and their observations stay at one address. Within one they are passed from step to step,
so that no step waits for a write of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import DeviceVectorEnv, join_position, position_parts, with_ended
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Observer
from ml_pipeline.training.env_batch import Choose, EnvStep, Row, Seen, torch_dtype
from ml_pipeline.training.graphs import Programs


class DeviceEnvs:
    """Env i of ``env`` is reset with ``seed + i``."""

    on_host = False
    has_reset_rows = False
    memory: Tensor | None = None  # no recurrent policies yet

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
        # What acting reads, if it is a program of its own:
        self._seen = self._obs.clone()
        self._noise: Tensor | None = None
        self._programs_of: dict[Choose, Callable[[], Tensor]] = {}
        # Within a program:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._obs
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
        self._hold(obs)
        return True

    def _hold(self, obs: Tensor) -> None:
        """Keep observations and positions at the address that captured programs read and write."""
        self._obs.copy_(obs)
        for place, part in zip(self._held, position_parts(self.env.position), strict=True):
            place.copy_(part)
        self.env.position = join_position(self._held)
        self.has_started = True

    def seen(self) -> tuple[dict[str, Tensor], None]:
        return {"": self._obs}, None

    def show(self, seen: Seen | None = None) -> None:
        self._parts, self._ended, self._now = self._held, self._none_ended, self._obs
        if seen is not None:
            self._now = seen.obs[""]
            self._now.copy_(self._obs)

    def act(
        self, agent: Observer, choose: Choose, noise: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if self.can_be_captured:
            sample = choose(PolicyInput(self._now, None, None, None), noise, out=out)
            self._action = sample.action if out is None else out
            return self._action
        self._action = self._act_alone(choose, noise)
        return self._action if out is None else out.copy_(self._action)

    def _act_alone(self, choose: Choose, noise: Tensor) -> Tensor:
        """Act in a program of its own, because the steps before and after it have none."""
        if self._noise is None:
            self._noise = noise.clone()
        self._seen.copy_(self._now)
        self._noise.copy_(noise)
        if choose not in self._programs_of:
            inputs = PolicyInput(self._seen, None, None, None), self._noise

            def act() -> Tensor:
                return choose(*inputs).action

            self._programs_of[choose] = self._programs.captured(act, "acting")
        action: Tensor = self._programs_of[choose]()
        return action

    def receive(self, agent: Observer, t: int, row: Row | None = None) -> EnvStep | None:
        places: list[Tensor] = []
        if row is not None and row.final_obs is not None:
            self._now = row.following.obs[""]
            places = [self._now, row.reward, row.terminated, row.truncated, row.final_obs]
        self._parts, self._ended, results = self._step(
            self._parts, self._ended, self._action, places
        )
        if places:
            return None
        self._now, reward, terminated, truncated, final_obs = results
        return EnvStep({"": self._now}, None, reward, terminated, truncated, final_obs)

    def end(self) -> None:
        for place, part in zip([*self._held, self._obs], [*self._parts, self._now], strict=True):
            place.copy_(part)
        self._totals += torch.stack(self._ended).sum(dim=1)

    def abandon(self) -> None:
        """Rows and positions may not match, so the next ``begin`` resets the envs."""
        self.has_started = False

    def inputs(self, agent: Observer) -> PolicyInput:
        return PolicyInput(self._obs, None, None, None)

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
        return {"envs": self.env.state_dict(), "obs": self._obs.to("cpu", copy=True)}

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Nothing: the envs are part of ``state_dict``."""

    def resume_at(self, state: StateDict, agent: Observer) -> None:
        self.env.load_state_dict(state["envs"])
        self._hold(state["obs"].to(self.env.device))


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
