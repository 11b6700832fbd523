"""RunPlan: a checked config, and what was built from it before a file or a process exists."""

from __future__ import annotations

from typing import NamedTuple

from ml_pipeline.assembly.self_play import SelfPlay
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.trial import EnvTrial
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.records import StateDict
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import first_env_seed
from ml_pipeline.training.contracts import Agent, Callback, RunContext


class RunPlan(NamedTuple):
    """A checked config and everything built from it before a file or a process exists."""

    config: TrainConfig
    context: RunContext
    make_env: EnvFactory
    tensor_env: type[TorchVectorEnv] | None  # None: the envs run in processes
    self_play: SelfPlay | None  # None: the env has no opponents from outside
    pool: OpponentPool | None  # of the opponents
    trial: EnvTrial  # of one env, as the agent sees it
    agent: Agent
    run: RunFolder  # of a new run: not yet on disk
    callbacks: dict[str, Callback]
    state: StateDict | None  # of the checkpoint to resume from
    remark: str  # on choices made while planning, or empty

    @property
    def where(self) -> str:
        """The device, for the user."""
        n_threads = self.config.cpu_threads
        is_many = self.context.device.type == "cpu" and n_threads > 1
        return f"{self.context} with {n_threads} threads" if is_many else str(self.context)

    @property
    def first_step(self) -> int:
        """Env steps that the run has already completed."""
        return int(self.state["env_steps"]) if self.state is not None else 0

    @property
    def wanted_steps(self) -> int:
        """Env steps of the complete run, in the envs of all ranks."""
        return self.config.wanted_steps_of(self.context.world.size)

    @property
    def no_snapshot(self) -> str | None:
        """Why a resumed run cannot continue its episodes; None: it can."""
        return None if self.tensor_env is not None else self.trial.no_snapshot

    @property
    def env_seed(self) -> int:
        """Seed of env 0 of this rank; its env i has this + i."""
        first = self.context.world.envs(self.config.n_envs).start
        return first_env_seed(self.config.seed, env_steps=self.first_step) + int(first)
