"""TensorReplaySteps: steps of a tensor env into a replay buffer; nothing leaves the device.

With graphs, acting, the step of all envs and the write of the row are one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import TorchVectorEnv, join_position, position_parts, with_ended
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Envs
from ml_pipeline.training.graphs import Programs


class TensorReplaySteps:
    """Steps of envs whose tensors are on the device of agent and buffer."""

    def __init__(
        self,
        agent: ReplayAgent[Any, Any, Any],
        envs: Envs,
        replay: ReplayBuffer,
        programs: Programs,
    ) -> None:
        (env,) = envs.parts
        if not isinstance(env, TorchVectorEnv):
            raise TypeError(f"{type(env).__name__} is not a tensor env")
        self.env: VectorEnv[Any, Any, Any] = env
        self._tensor_env = env
        self._env_seed = envs.first_seed
        self._agent = agent
        self._replay = replay
        self._rates: Any = None
        self._noises: Tensor | None = None  # of an iteration
        self._noise: Tensor | None = None  # of a step
        self._has_started = False
        nothing = torch.zeros(env.num_envs, device=env.device)
        # Number, summed returns and summed lengths of the episodes that ended, per env.
        self._ended = [nothing.clone() for _ in range(3)]
        self._transition = programs.compiled(self._pure_step, f"a step of {type(env).__name__}")
        self._step = {
            is_random: programs.captured(
                lambda is_random=is_random: self._take_step(is_random),  # type: ignore[misc]
                "a step with replay",
            )
            for is_random in (False, True)
        }

    def begin(self, rates: Any, noise: Tensor) -> None:
        self._rates, self._noises = rates, noise
        if not self._has_started:
            self._has_started = True
            obs, _ = self._tensor_env.reset(seed=self._env_seed)
            self._hold_position()
            self._replay.end_episodes()
            self._replay.begin({"": obs}, None)

    def send(self, t: int, *, is_random: bool) -> None:
        """Act, step all envs and write the row of step ``t`` of the iteration."""
        if self._noises is None:
            raise RuntimeError("there is no noise yet; call begin")
        noise = self._noises[self._agent.distribution.noise_row(t)]
        if self._noise is None:
            self._noise = torch.empty_like(noise)
        self._noise.copy_(noise)
        self._step[is_random]()
        self._replay.count_row()

    @torch.no_grad()
    def _take_step(self, is_random: bool) -> None:
        agent, replay, noise = self._agent, self._replay, self._noise
        if noise is None:
            raise RuntimeError("there is no noise yet; call send")
        obs = replay.current_obs()
        inputs = PolicyInput(obs, None, None, None)
        action = agent.explore(inputs, noise, self._rates, is_random=is_random).action
        held = position_parts(self._tensor_env.position)
        parts, ended, result = self._transition(held, self._ended, action)
        for place, part in zip([*held, *self._ended], [*parts, *ended], strict=True):
            place.copy_(part)
        replay.insert(action, *result)
        agent.learn_moments(replay.current_obs())

    def _pure_step(
        self, parts: list[Tensor], ended: list[Tensor], action: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        env_action = self._agent.distribution.to_torch_env(action)
        position, result = self._tensor_env.transition(join_position(parts), env_action)
        told = [result.reward, result.terminated, result.truncated, result.obs, result.final_obs]
        return position_parts(position), with_ended(ended, result), told

    def receive(self, t: int) -> None:
        """Nothing: ``send`` has written the row."""

    def end(self, n_steps: int) -> list[Episode]:
        """One entry: the mean of the episodes that ended."""
        n, total, length = torch.stack(self._ended).sum(dim=1).tolist()
        for each in self._ended:
            each.zero_()
        return [Episode(total / n, length / n, int(n), {})] if n else []

    def _hold_position(self) -> None:
        """Give the envs their own tensors for their positions: each step overwrites them."""
        parts = [part.clone() for part in position_parts(self._tensor_env.position)]
        self._tensor_env.position = join_position(parts)

    def snapshots(self) -> list[bytes]:
        """Empty: the envs are part of ``position``."""
        return []

    def resume_at(self, position: Any, snapshots: Sequence[bytes]) -> None:
        if not isinstance(position, dict):
            raise ValueError(
                "the checkpoint holds no env positions, or those of another kind of env"
            )
        self._tensor_env.load_state_dict(position["envs"])
        self._hold_position()
        self._has_started = True
        self._replay.begin({"": position["obs"].to(self._replay.device)}, None)

    def position(self) -> Any:
        if not self._has_started:
            return None
        obs = self._replay.current_obs().to("cpu", copy=True)
        return {"envs": self._tensor_env.state_dict(), "obs": obs}

    def state_dict(self) -> StateDict:
        return {"n_steps": 0}

    def load_state_dict(self, state: StateDict) -> None:
        """Nothing: ``resume_at`` restores the envs."""
