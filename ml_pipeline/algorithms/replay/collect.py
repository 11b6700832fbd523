"""ReplaySteps: plays an agent in a vector env and writes every transition to a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.final_observations import FinalObservation
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.observations import ObservationError
from ml_pipeline.records import StateDict
from ml_pipeline.training.acting import GpuActing
from ml_pipeline.training.checks import BadValueError, FiniteCheck
from ml_pipeline.training.columns import Columns, Step, restore_columns
from ml_pipeline.training.contracts import Envs
from ml_pipeline.training.graphs import Programs


class ReplaySteps:
    """Steps of envs in host memory, in processes or not; see ``TensorReplaySteps``."""

    def __init__(
        self,
        agent: ReplayAgent[Any, Any, Any],
        envs: Envs,
        replay: ReplayBuffer,
        programs: Programs,
    ) -> None:
        (env,) = envs.parts
        self._agent = agent
        self._replay = replay
        self._columns = Columns(env, 0, envs.infos_have_episodes, in_turns=True)
        self._env_seed = envs.first_seed
        self._check = FiniteCheck(enabled=True)
        self._rates: Any = None
        self._noise: Any = None  # of an iteration: a tensor, or an array if the agent takes arrays
        self._action: NDArray[Any] = np.zeros(0)
        self._episodes: list[Episode] = []
        self._acting: GpuActing | None = None
        if agent.device.type == "cuda":
            self._acting = GpuActing(agent, env.num_envs, programs, self._explore)

    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        env: VectorEnv[Any, Any, Any] = self._columns.env
        return env

    def begin(self, rates: Any, noise: Tensor) -> None:
        """Before the steps of an iteration; resets the envs if they have not started."""
        self._rates = rates
        self._noise = noise.numpy() if self._agent.takes_arrays else noise
        columns, agent = self._columns, self._agent
        if not columns.leaves:
            columns.reset(agent, self._env_seed)
            self._check.obs(columns.leaves, first_env=0, t=0)
            self._replay.end_episodes()
            self._replay.begin(columns.leaves, columns.mask)

    def send(self, t: int, *, is_random: bool) -> None:
        """Choose the actions of step ``t`` of the iteration; the envs step until ``receive``."""
        columns, agent = self._columns, self._agent
        noise = self._noise[agent.distribution.noise_row(t)]
        if self._acting is None or is_random:
            inputs = columns.inputs(agent)
            sample = agent.explore(inputs, noise, self._rates, is_random=is_random)
            action: Any = sample.action
            self._action = action if agent.takes_arrays else action.cpu().numpy()
        else:
            start = columns.episode_start
            self._acting.begin(columns.leaves, columns.mask, None, start, noise)
            self._action = self._acting.actions()
        columns.send(agent.distribution.to_env(self._action))

    def _explore(self, inputs: PolicyInput, noise: Tensor) -> PolicySample:
        return self._agent.explore(inputs, noise, self._rates, is_random=False)

    def receive(self, t: int) -> None:
        """Wait for the envs, and write the results of step ``t`` of the iteration."""
        columns, agent = self._columns, self._agent
        try:
            step = columns.receive(agent)
        except ObservationError as error:
            when = self._check.when(t + 1)
            raise BadValueError(f"env {error.index}, at {when}: {error}") from error
        self._check.reward(step.reward, first_env=0, t=t)
        self._check.obs(columns.leaves, first_env=0, t=t + 1)
        self._replay.write(
            self._action,
            step.reward,
            step.terminated,
            step.truncated,
            columns.leaves,
            columns.mask,
            self._finals(step, t),
        )
        if agent.config.normalize_obs:
            agent.learn_moments(agent.reader.to_tensors(columns.leaves, agent.device))
        self._episodes += step.episodes

    def _finals(self, step: Step, t: int) -> list[FinalObservation]:
        finals = []
        if np.count_nonzero(step.truncated):  # far faster than any()
            for env in np.flatnonzero(step.truncated & ~step.terminated).tolist():
                leaves = self._agent.reader.read(step.infos["final_obs"][env])
                one = {name: leaf[np.newaxis] for name, leaf in leaves.items()}
                self._check.obs(one, first_env=env, t=t + 1)
                mask = self._final_mask(leaves, step.infos, env)
                finals.append(FinalObservation(env, leaves, mask))
        return finals

    def _final_mask(self, leaves: dict[str, Any], infos: dict[str, Any], env: int) -> Any:
        masks = self._agent.masks
        if masks.leaf is not None:
            return leaves[masks.leaf] != 0
        final = infos.get("final_info", {}) if masks.in_infos else {}
        given = final.get("action_mask")
        return None if given is None else np.asarray(given[env], dtype=bool)

    def end(self, n_steps: int) -> list[Episode]:
        """After the steps of an iteration; returns the episodes that ended."""
        self._check.n_steps += n_steps
        episodes, self._episodes = self._episodes, []
        return episodes

    def snapshots(self) -> list[bytes]:
        return list(self._columns.env.snapshot())

    def resume_at(self, position: Any, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue within the saved episodes."""
        restore_columns([self._columns], position, snapshots, self._agent)
        self._replay.begin(self._columns.leaves, self._columns.mask)

    def position(self) -> Any:
        """The current step of the envs, for a checkpoint."""
        return [self._columns.state_dict()]

    def state_dict(self) -> StateDict:
        return {"n_steps": self._check.n_steps}

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes."""
        self._check.n_steps = state["n_steps"]
