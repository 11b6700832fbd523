"""Collector: plays a policy in many envs and writes the transitions into a rollout buffer.

The same loop plays envs in workers and tensor envs; ``EnvBatch`` hides where they live. With
several vector envs it is double-buffered: it acts in one while the others step. A rollout of tensor
envs is captured as one CUDA graph, if graphs are enabled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.algorithms.ppo.on_device import DeviceNoise, GpuStopwatch
from ml_pipeline.algorithms.ppo.rollout import RolloutBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.device_envs import DeviceEnvs
from ml_pipeline.training.env_batch import EnvBatch, Row, restore_positions, saved_positions
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.host_envs import FiniteCheck, HostEnvs
from ml_pipeline.training.reward_scaler import RewardScaler


class Collector:
    """Collects rollouts in ``envs``; the buffer has their columns in the same order."""

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
        self._programs = programs
        self._world = world
        self._check = FiniteCheck(enabled=not allow_nonfinite)
        self._batches: list[HostEnvs | DeviceEnvs] = []
        for env in envs:
            if isinstance(env, DeviceVectorEnv):
                self._batches.append(DeviceEnvs(env, seed=env_seed, programs=programs))
            else:
                host = HostEnvs(
                    env,
                    first=self.n_envs,
                    seed=env_seed + self.n_envs,
                    check=self._check,
                    infos_have_episodes=infos_have_episodes,
                    in_background=len(envs) > 1,
                    programs=programs,
                )
                self._batches.append(host)
            self.n_envs += env.num_envs
        self.on_host = self._batches[0].on_host
        self.has_reset_rows = any(each.has_reset_rows for each in self._batches)
        self._host_seconds = 0.0  # that the last rollout took
        is_on_gpu = not self.on_host and self._batches[0].env.device.type == "cuda"
        self._watch = GpuStopwatch() if is_on_gpu else None
        self._noise: Any = None  # of a rollout in host memory, [T, n_envs, ...]
        self._device_noise: DeviceNoise | None = None
        self._generator = torch.Generator().manual_seed(noise_seed)
        self._state_before: Tensor | None = None  # the generator's, during a rollout
        self._episodes: list[Episode] = []
        self._played: tuple[RolloutBuffer, Actor] | None = None
        self._rows: list[list[Row]] = []  # of the buffer, for each batch
        self._play: Callable[[], None] = lambda: None

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [batch.env for batch in self._batches]

    @property
    def is_between_rollouts(self) -> bool:
        """Whether the envs are where the last complete rollout left them."""
        return self._state_before is None

    def new_buffer(self, n_steps: int, agent: Any) -> RolloutBuffer:
        programs = None if self.on_host else self._programs or Programs(agent.device)
        buffer = RolloutBuffer(n_steps, self.n_envs, agent, programs, self._world)
        if self.has_reset_rows:
            buffer.is_reset = np.zeros((n_steps, self.n_envs), dtype=bool)
        return buffer

    def new_scaler(self, *, gamma: float, clip: float) -> RewardScaler[Any]:
        start: Any = np.zeros(self.n_envs)
        if not self.on_host:
            start = torch.zeros(self.n_envs, device=self._batches[0].env.device)
        return RewardScaler(start, gamma=gamma, clip=clip, world=self._world)

    def collect(self, agent: Actor, buffer: RolloutBuffer) -> None:
        """Fill ``buffer``; a device may still be working when this returns."""
        start = time.perf_counter()
        if self._watch is not None:
            self._watch.start()
        if (buffer, agent) != self._played:
            self._take(buffer, agent)
        for batch in self._batches:
            batch.begin(agent)
        buffer.begin(self._memory())
        self._state_before = self._generator.get_state()
        if self._device_noise is not None:
            self._device_noise.draw(self._generator)
        else:
            self._noise = self._drawn_noise(agent, buffer.n_steps)
        self._episodes = []
        try:
            self._play()
        except KeyboardInterrupt:
            for batch in self._batches:
                batch.abandon()
            raise
        buffer.end(self._memory())
        if self._watch is not None:
            self._watch.stop()
        self._host_seconds = time.perf_counter() - start

    def _drawn_noise(self, agent: Actor, n_steps: int) -> Any:
        """All ranks draw the noise of all envs; each uses that of its own."""
        n_all_envs = self._world.all_envs(self.n_envs)
        noise = agent.draw_noise(n_steps, n_all_envs, self._generator)
        own = noise[:, self._world.envs(self.n_envs)]
        return own.numpy() if agent.takes_arrays else own

    @property
    def episodes(self) -> list[Episode]:
        """Those that ended in the last rollout, in order of time; of tensor envs only their mean.

        Waits for a device.
        """
        return self._episodes + [each for batch in self._batches for each in batch.ended_episodes()]

    @property
    def seconds(self) -> float:
        """The time of the last rollout; waits for a device."""
        return self._host_seconds if self._watch is None else self._watch.seconds()

    def _memory(self) -> Tensor | None:
        """The recurrent state in all envs."""
        memories = [each.memory for each in self._batches if each.memory is not None]
        return torch.cat(memories) if memories else None

    def commit(self, n_steps: int) -> None:
        """The agent learned from the rollout; before this call, an interrupt discards it."""
        self._state_before = None
        self._check.n_steps += n_steps

    def _take(self, buffer: RolloutBuffer, agent: Actor) -> None:
        """Build the program that fills this buffer."""
        self._played = buffer, agent
        steps = range(buffer.n_steps)
        self._rows = [[buffer.row(t, each.place) for t in steps] for each in self._batches]
        self._play = partial(self._rollout, agent, buffer)
        if not self.on_host:
            programs = self._programs or Programs(agent.device)
            sizes = agent, buffer.n_steps, self.n_envs, self._world
            self._device_noise = DeviceNoise(*sizes, programs)
            if self._batches[0].can_be_captured:
                self._play = programs.captured(self._play, "a rollout")

    @torch.no_grad()
    def _rollout(self, agent: Actor, buffer: RolloutBuffer) -> None:
        if self._device_noise is not None:
            noises: list[Any] = [self._device_noise.rows()]
        else:
            noises = [list(self._noise[:, batch.place]) for batch in self._batches]
        for batch in self._batches:
            batch.show(buffer.seen(0, batch.place))
        for t in range(buffer.n_steps):
            for batch, rows, noise in zip(self._batches, self._rows, noises, strict=True):
                if t > 0:
                    self._receive(batch, t - 1, rows, agent, buffer)
                noise_row = noise[agent.distribution.noise_row(t)]
                batch.act(agent, agent.sample_batch, noise_row, out=rows[t].action)
        for batch, rows in zip(self._batches, self._rows, strict=True):
            self._receive(batch, buffer.n_steps - 1, rows, agent, buffer)
            batch.end()

    def _receive(
        self, batch: EnvBatch, t: int, rows: list[Row], agent: Actor, buffer: RolloutBuffer
    ) -> None:
        """Write the results of the actions of row ``t``."""
        step = batch.receive(agent, t, rows[t])
        if step is not None:
            self._episodes += step.episodes
            if buffer.is_reset is not None:
                buffer.is_reset[t, batch.place] = step.is_reset
            for final in step.finals:
                buffer.final_steps[t, batch.place.start + final.env] = final

    def resize(self, n_envs: int, agent: Actor) -> None:
        """Call between two rollouts; remaining envs keep their episodes."""
        if len(self._batches) > 1:
            raise TypeError("collector=double cannot change its number of envs")
        self._batches[0].resize(n_envs, agent)
        self.n_envs = n_envs

    def snapshots(self) -> list[bytes]:
        """All envs as bytes; empty for tensor envs, which are part of ``state_dict``."""
        return [each for batch in self._batches for each in batch.snapshots()]

    def resume_at(self, positions: Any, snapshots: Sequence[bytes], agent: Actor) -> None:
        """Continue within the episodes of ``positions`` and ``snapshots``."""
        restore_positions(self._batches, positions, snapshots, agent)

    def state_dict(self) -> StateDict:
        """Saves the generator as it was before an interrupted rollout."""
        state = self._generator.get_state() if self._state_before is None else self._state_before
        position = saved_positions(self._batches) if self.is_between_rollouts else None
        return {"generator": state, "n_steps": self._check.n_steps, "position": position}

    def load_state_dict(self, state: StateDict) -> None:
        self._generator.set_state(state["generator"])
        self._check.n_steps = int(state["n_steps"])
