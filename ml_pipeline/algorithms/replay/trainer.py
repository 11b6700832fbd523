"""OffPolicyTrainer: one iteration of DQN or SAC. The agent learns from replay while envs step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from gymnasium.vector import VectorEnv

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.collect import ReplaySteps
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.files import read_replay, replay_names, write_replay
from ml_pipeline.algorithms.replay.learning import ReplayLearning
from ml_pipeline.envs.episode_stats import EpisodeWindow
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.contracts import Envs, FileStore, RunContext
from ml_pipeline.training.schedules import annealed


class OffPolicyTrainer:
    """Trains ``agent`` in one vector env; on several ranks in one each."""

    def __init__(
        self,
        agent: ReplayAgent[Any, Any, Any],
        envs: Envs,
        config: OffPolicyConfig,
        context: RunContext,
    ) -> None:
        if remark := agent.check_fast():
            context.programs.tell(remark)
        self.agent = agent
        self.config = config
        self.world = context.world
        self.progress = 0.0  # through the run, for the schedules
        self.episodes = EpisodeWindow()
        is_tensor = isinstance(envs.parts[0], TorchVectorEnv)
        self.replay = ReplayBuffer(
            int(config.buffer_size),
            envs.parts[0].num_envs,
            agent.reader,
            agent.distribution,
            n_step=config.n_step,
            gamma=config.gamma,
            device=context.device,
            has_masks=agent.masks.are_used,
            priority_exponent=config.replay_exponent,
            stacked_frames=config.stacked_frames,
            programs=context.programs,
            on_device=is_tensor,
            world=context.world,
        )
        self._steps = ReplaySteps(agent, envs, self.replay, context.programs)
        self._learning = ReplayLearning(
            agent,
            self.replay,
            context.programs,
            batch_size=config.batch_size,
            seed=stream_seed(context.seed, "minibatches"),
            world=context.world,
        )
        self._noise = torch.Generator().manual_seed(stream_seed(context.seed, "actions"))
        self._is_complete = True  # no iteration is half done

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [self._steps.env]

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.replay.n_all_envs)

    @property
    def n_updates(self) -> int:
        return self._learning.n_updates

    @property
    def _env_steps(self) -> int:
        return self.replay.n_written * self.replay.n_all_envs

    def train_episode_vectorized(self, hold: Callable[[], None] = lambda: None) -> Metrics:
        """One iteration: ``iteration_length`` steps of each env, and the updates that are due."""
        hold()  # the agent learns from the first step on, so the iteration cannot be undone
        start, n_before = time.perf_counter(), self.n_updates
        learn_seconds = 0.0
        self._is_complete = False
        config, steps, learning = self.config, self._steps, self._learning
        learning_rate = annealed(config.learning_rate, config.learning_rate_schedule, self.progress)
        rates = self.agent.rates(self.progress, learning_rate)
        n_steps = config.iteration_length
        noise = self.agent.draw_noise(n_steps, self.replay.n_all_envs, self._noise)
        noise = noise[:, self.world.envs(self.replay.n_envs)]
        due = self._updates_due(n_steps)
        steps.begin(learning.begin(rates, sum(due)), noise)
        for t in range(n_steps):
            steps.send(t, is_random=self._env_steps < config.learning_starts)
            learn_start = time.perf_counter()
            if len(self.replay):
                learning.run(due[t])  # while the envs step
            learn_seconds += time.perf_counter() - learn_start
            steps.receive(t)
        episodes = self.world.joined(steps.end(n_steps))
        self._is_complete = True
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
        read_replay(files, self.replay, state.get("rank_segments"), self.world.rank)

    def files_in(self, state: StateDict) -> set[str]:
        return replay_names(state)

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; None during an iteration."""
        return list(self._steps.snapshots()) if self._is_complete else None

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        self._steps.resume_at(state["positions"], snapshots)

    def state_dict(self) -> StateDict:
        return {
            "agent": self.agent.state_dict(),
            "replay": self.replay.state_dict(),
            **self._learning.state_dict(),
            **self._steps.state_dict(),
            "noise_generator": self._noise.get_state(),
            "positions": self._steps.position() if self._is_complete else None,
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
        self._noise.set_state(state["noise_generator"])
        self.episodes.load_state_dict(state)
        self._steps.load_state_dict(state)


def load_position(replay: ReplayBuffer, state: StateDict) -> None:
    """Everything of a buffer except the transitions: its counters and current observations."""
    replay.load_state_dict(state["replay"])
    positions = state["positions"]
    if positions is None:
        replay.forget_newest()  # stopped during an iteration
    elif isinstance(positions, dict):  # of a tensor env
        replay.begin({"": positions["obs"]}, None)
    elif positions[0]["leaves"]:
        leaves = {name: leaf.numpy() for name, leaf in positions[0]["leaves"].items()}
        mask = positions[0]["mask"]
        replay.begin(leaves, None if mask is None else mask.numpy())


def check_envs(envs: Envs) -> None:
    """Refuse envs that replay does not support."""
    if len(envs.parts) > 1:
        raise TrainingError("collector=double: replay learns while envs step; use collector=sync")
