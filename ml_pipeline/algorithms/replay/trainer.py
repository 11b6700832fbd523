"""OffPolicyTrainer: one iteration of DQN or SAC. The agent learns from replay while envs step.

For a tensor env, acting, the step of all envs and the write of the row are captured as one graph,
if graphs are enabled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Generic

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import RatesT, ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.files import (
    find_lost,
    read_replay,
    replay_names,
    write_replay,
)
from ml_pipeline.algorithms.replay.learning import ReplayLearning
from ml_pipeline.envs.episode_stats import Episode, EpisodeWindow
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.signals import Hold, never_held
from ml_pipeline.training.contracts import Envs, FileStore, RunContext
from ml_pipeline.training.device_envs import DeviceEnvs
from ml_pipeline.training.env_batch import (
    ArrayOrTensor,
    Choose,
    EnvBatch,
    EnvStep,
    restore_positions,
    saved_positions,
)
from ml_pipeline.training.host_envs import FiniteCheck, HostEnvs
from ml_pipeline.training.schedules import find_schedule


class OffPolicyTrainer(Generic[RatesT]):
    """Trains ``agent`` in one vector env; on several ranks in one each."""

    def __init__(
        self,
        agent: ReplayAgent[OffPolicyConfig, RatesT, Any],
        envs: Envs,
        config: OffPolicyConfig,
        context: RunContext,
    ) -> None:
        if remark := agent.check_fast():
            context.programs.tell(remark)
        self._tell = context.programs.tell
        self.agent = agent
        self.config = config
        self.world = context.world
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
                in_background=True,
                programs=context.programs,
            )
        self.replay = ReplayBuffer(
            int(config.buffer_size),
            env.num_envs,
            agent.reader,
            agent.distribution,
            n_step=config.n_step,
            gamma=config.gamma,
            device=context.device,
            has_masks=agent.masks.are_used,
            priority_exponent=config.replay_exponent,
            stacked_frames=config.stacked_frames,
            programs=context.programs,
            on_device=not self._batch.on_host,
            has_reset_rows=self._batch.has_reset_rows,
            world=context.world,
        )
        self._learning = ReplayLearning(
            agent,
            self.replay,
            context.programs,
            batch_size=config.batch_size,
            seed=stream_seed(context.seed, "minibatches"),
            world=context.world,
        )
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "actions"))
        self._schedule = find_schedule(
            config.learning_rate_schedule, key="agent.learning_rate_schedule"
        )
        self._is_under_way = False  # an iteration; still true after an interrupt
        self._rates = agent.rates(0.0, config.learning_rate)
        self._noise: ArrayOrTensor = None  # of a step of tensor envs, always in the same place
        self._action: ArrayOrTensor = None
        self._episodes: list[Episode] = []
        self._device_step: dict[Choose, Callable[[], None]] = {}
        for choose in (self._explore, self._explore_at_random):
            step: Callable[[], None] = partial(self._step, choose)
            if self._batch.can_be_captured:
                step = context.programs.captured(step, "a step with replay")
            self._device_step[choose] = step

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [self._batch.env]

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.replay.n_all_envs)

    @property
    def n_updates(self) -> int:
        return self._learning.n_updates

    @property
    def _env_steps(self) -> int:
        return self.replay.n_written * self.replay.n_all_envs

    def train_episode_vectorized(self, hold: Hold = never_held) -> Metrics:
        """One iteration: ``iteration_length`` steps of each env, and the updates that are due.

        An interrupt leaves complete updates and transitions; the iteration is not undone.
        """
        start, n_before = time.perf_counter(), self.n_updates
        learn_seconds = 0.0
        self._begin()
        config, learning = self.config, self._learning
        learning_rate = config.learning_rate * self._schedule(self.progress)
        rates = self.agent.rates(self.progress, learning_rate)
        n_steps = config.iteration_length
        due = self._updates_due(n_steps)
        self._rates = learning.begin(rates, sum(due))
        noise = self._draw_noise(n_steps)
        for t in range(n_steps):
            self._act(noise[self.agent.distribution.noise_row(t)], hold)
            learn_start = time.perf_counter()
            if len(self.replay):
                learning.run(due[t], hold)  # while the envs step
            learn_seconds += time.perf_counter() - learn_start
            if self._batch.on_host:
                step = self._received(t)
                with hold():
                    self._write(step)
        hold()  # the rest completes the iteration
        episodes = self.world.joined(self._end(n_steps))
        means = learning.means()
        seconds = time.perf_counter() - start
        return {
            "n_envs": self.replay.n_all_envs,
            **self.episodes.add(episodes),
            **means,
            "policy/learning_rate": learning_rate,
            **({"policy/epsilon": rates.epsilon} if hasattr(rates, "epsilon") else {}),
            "replay/size": float(len(self.replay)),
            "time/updates_per_env_step": (self.n_updates - n_before) / self.iteration_steps,
            "time/updates_per_second": (self.n_updates - n_before) / seconds,
            "time/collect_seconds": seconds - learn_seconds,
        }

    def _draw_noise(self, n_steps: int) -> ArrayOrTensor:
        """The noise of this rank's envs: that of all ranks does not depend on their number."""
        noise = self.agent.draw_noise(n_steps, self.replay.n_all_envs, self._generator)
        own = noise[:, self.world.envs(self.replay.n_envs)]
        return own.numpy() if self.agent.takes_arrays and self._batch.on_host else own

    def _begin(self) -> None:
        """Reset the envs if they have not started."""
        was_interrupted, self._is_under_way = self._is_under_way, True
        if was_interrupted:
            self._batch.abandon()
        # After an interrupt the envs are a step ahead of the buffer, or start again.
        if self._batch.begin(self.agent) or was_interrupted:
            self.replay.end_episodes()
            self.replay.begin(*self._batch.seen())

    def _act(self, noise: ArrayOrTensor, hold: Hold) -> None:
        """Choose actions. Host envs step until ``_received``; tensor envs make a whole step."""
        is_random = self._env_steps < self.config.learning_starts
        choose = self._explore_at_random if is_random else self._explore
        if self._batch.on_host:
            self._action = self._batch.act(self.agent, choose, noise)
            return
        if self._noise is None:
            self._noise = torch.empty_like(noise)
        with hold():
            self._noise.copy_(noise)
            self._device_step[choose]()
            self.replay.count_row()

    def _explore(self, inputs: PolicyInput, noise: Tensor, out: None = None) -> PolicySample:
        return self.agent.explore(inputs, noise, self._rates, is_random=False)

    def _explore_at_random(
        self, inputs: PolicyInput, noise: Tensor, out: None = None
    ) -> PolicySample:
        return self.agent.explore(inputs, noise, self._rates, is_random=True)

    @torch.no_grad()
    def _step(self, choose: Choose) -> None:
        """A step of tensor envs, on their device."""
        self._batch.show()
        self._action = self._batch.act(self.agent, choose, self._noise)
        self._write(self._received(0))
        self._batch.end()

    def _received(self, t: int) -> EnvStep:
        """Wait for the results of step ``t`` of the iteration, which may take long."""
        step = self._batch.receive(self.agent, t)
        if step is None:
            raise RuntimeError("the envs returned no step")
        return step

    def _write(self, step: EnvStep) -> None:
        agent = self.agent
        self.replay.write(self._action, step)
        self._episodes += step.episodes
        if agent.config.normalize_obs:
            seen = step.obs
            if step.is_reset is not None:  # the next step of ended envs is not a transition
                is_used = ~(step.terminated | step.truncated)
                seen = {name: leaf[is_used] for name, leaf in seen.items()}
            on_host = self._batch.on_host
            reader = agent.reader
            obs = reader.to_tensors(seen, agent.device) if on_host else reader.joined(seen)
            if len(next(iter(seen.values()))):
                agent.learn_moments(obs)

    def _end(self, n_steps: int) -> list[Episode]:
        """The episodes that ended in this iteration."""
        self._is_under_way = False
        self._check.n_steps += n_steps
        episodes, self._episodes = self._episodes, []
        return episodes + self._batch.ended_episodes()

    def _updates_due(self, n_steps: int) -> list[int]:
        """Updates during each of the next steps; the env steps before it make them due.

        A buffer that was cleared must fill again first; the updates of that time are left out.
        """
        ratio, starts = self.config.updates_per_env_step, int(self.config.learning_starts)
        replay, n_envs = self.replay, self.replay.n_all_envs
        env_steps = [self._env_steps + t * n_envs for t in range(-1, n_steps)]
        totals = [int(ratio * max(each - starts, 0)) for each in env_steps]
        full = replay.first * n_envs + min(starts, replay.capacity_rows * n_envs)
        return [
            total - before if now >= full else 0
            for (before, total), now in zip(pairwise(totals), env_steps[1:], strict=True)
        ]

    def forget(self) -> None:
        """Drop all transitions; learning waits until the buffer has filled again."""
        self.replay.clear()

    def save_files(self, files: FileStore) -> None:
        write_replay(files, self.replay)

    def load_files(self, files: FileStore, state: StateDict) -> None:
        replay, segments = self.replay, state.get("rank_segments")
        lost = None
        if files.salvages:
            lost = self.world.joined(find_lost(files, replay, segments))
        n_before = len(replay)
        read_replay(files, replay, segments, self.world.rank, lost)
        if lost is not None and len(replay) < n_before:
            errors = dict.fromkeys(each.error for each in lost)  # ranks may share files
            self._tell(
                f"salvage=true: {n_before - len(replay):,} of {n_before:,} transitions are lost, "
                f"and {len(replay):,} are kept: {'; '.join(errors) or 'they were not saved'}"
            )

    def files_in(self, state: StateDict) -> set[str]:
        return replay_names(state)

    def disk_need(self, env_steps: int) -> tuple[int, str]:
        """Without final observations, whose number nobody knows yet."""
        replay = self.replay
        n_rows = min(replay.n_rows, env_steps // replay.n_all_envs)
        n_bytes = n_rows * replay.row_bytes * replay.n_all_envs // replay.n_envs
        return n_bytes, f"lower agent.buffer_size={int(self.config.buffer_size)}"

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; None during an iteration, empty for tensor envs."""
        return None if self._is_under_way else self._batch.snapshots()

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        restore_positions([self._batch], state["positions"], snapshots, self.agent)
        self._is_under_way = False
        self.replay.begin(*self._batch.seen())

    def state_dict(self) -> StateDict:
        return {
            "agent": self.agent.state_dict(),
            "replay": self.replay.state_dict(),
            **self._learning.state_dict(),
            "n_steps": self._check.n_steps,
            "noise_generator": self._generator.get_state(),
            "positions": None if self._is_under_way else saved_positions([self._batch]),
            **self.episodes.state_dict(),
        }

    def own_state(self) -> StateDict:
        """The envs and transitions of a rank are its own; the priorities are those of all."""
        state = self.state_dict()
        shared = ("priorities", "top_priority")
        replay = {name: each for name, each in state["replay"].items() if name not in shared}
        return {"positions": state["positions"], "replay": replay}

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes and the transitions."""
        self.agent.load_state_dict(state["agent"])
        load_position(self.replay, state)
        self._learning.load_state_dict(state)
        self._generator.set_state(state["noise_generator"])
        self.episodes.load_state_dict(state)
        self._check.n_steps = int(state["n_steps"])


def load_position(replay: ReplayBuffer, state: StateDict) -> None:
    """Everything of a buffer except the transitions: its counters and current observations."""
    replay.load_state_dict(state["replay"])
    positions = state["positions"]
    if positions is None:
        replay.forget_newest()  # stopped during an iteration
    elif isinstance(positions, dict):  # of a tensor env
        obs = positions["obs"]
        leaves = obs if isinstance(obs, dict) else {"": obs}
        replay.begin(leaves, positions.get("mask"))  # older checkpoints have no masks
    elif positions[0]["leaves"]:
        leaves = {name: leaf.numpy() for name, leaf in positions[0]["leaves"].items()}
        mask = positions[0]["mask"]
        replay.begin(leaves, None if mask is None else mask.numpy())
