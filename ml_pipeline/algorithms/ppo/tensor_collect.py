"""TensorCollector: plays a policy in a tensor env; nothing leaves the device during a rollout.

If graphs are enabled, a whole rollout is one CUDA graph with a few kernels per step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.algorithms.ppo.tensor_rollout import TensorBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.tensor_env import TorchVectorEnv, join_position, position_parts, with_ended
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.graphs import Programs, send
from ml_pipeline.training.reward_scaler import RewardScaler


class TensorRolloutStats:
    """What happened in a rollout; reading a property waits for the device."""

    def __init__(self, collector: TensorCollector) -> None:
        self._collector = collector

    @property
    def episodes(self) -> list[Episode]:
        """One entry: the mean of all episodes that ended."""
        n, episode_return, length = self._collector.totals.tolist()
        return [Episode(episode_return / n, length / n, int(n), {})] if n else []

    @property
    def seconds(self) -> float:
        return self._collector.seconds()


class TensorCollector:
    """Collects rollouts in ``env``, on the device that env and agent share."""

    on_host = False

    def __init__(
        self,
        env: TorchVectorEnv,
        *,
        env_seed: int,
        noise_seed: int,
        programs: Programs,
        world: World = ALONE,
    ) -> None:
        """Env i is reset with ``env_seed + i`` before the first step."""
        self.env = env
        self.n_envs = env.num_envs
        self.n_steps = 0  # of each env, in complete rollouts
        self._env_seed = env_seed
        self._generator = torch.Generator().manual_seed(noise_seed)
        self._state_before: Tensor | None = None  # the generator's, during a rollout
        self._programs = programs
        self._world = world
        self._key = torch.zeros((), dtype=torch.int64, device=env.device)
        # Three tensors: if one stood for all, the first step would be compiled by itself.
        self._none_ended = [torch.zeros(self.n_envs, device=env.device) for _ in range(3)]
        # Number, summed returns and summed lengths of the episodes that ended in the last rollout.
        self.totals = torch.zeros(3, device=env.device)
        self._obs: Tensor | None = None  # to act on, until the buffer holds it
        self._buffer: TensorBuffer | None = None
        self._rollout: Any = None
        self._marks: list[Any] = []

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return [self.env]

    @property
    def is_between_rollouts(self) -> bool:
        return self._state_before is None

    def new_buffer(self, n_steps: int, agent: Any) -> TensorBuffer:
        return TensorBuffer(n_steps, self.n_envs, agent, self._programs)

    def new_scaler(self, *, gamma: float, clip: float) -> RewardScaler[Tensor]:
        start = torch.zeros(self.n_envs, device=self.env.device)
        return RewardScaler(start, gamma=gamma, clip=clip, world=self._world)

    def collect(self, agent: Actor, buffer: TensorBuffer) -> TensorRolloutStats:
        """Fill ``buffer``; the device may still be working when this returns."""
        if buffer is not self._buffer:
            self._take(buffer, agent)
        if self._obs is None:
            self._obs, _ = self.env.reset(seed=self._env_seed)
            self._hold_position()
            buffer.obs[-1].copy_(self._obs)
        self._state_before = self._generator.get_state()
        send(counter_random.draw_keys(1, self._generator)[0], self._key)
        begin = self._mark()
        try:
            self._rollout()
        except KeyboardInterrupt:
            self._obs = None  # rows and positions may not match; the next rollout resets the envs
            raise
        self._marks = [begin, self._mark()]
        return TensorRolloutStats(self)

    def commit(self, n_steps: int) -> None:
        """The agent learned from the rollout of ``n_steps``."""
        self._state_before = None
        self.n_steps += n_steps

    def _take(self, buffer: TensorBuffer, agent: Actor) -> None:
        """Build the program that fills this buffer."""
        self._buffer = buffer
        if self._obs is not None:
            buffer.obs[-1].copy_(self._obs)
        env, distribution = self.env, agent.distribution
        n_envs, own = self._world.size * self.n_envs, self._world.envs(self.n_envs)
        noise_shape = distribution.noise_shape(buffer.n_steps, n_envs)
        draw = counter_random.randn if distribution.has_normal_noise else counter_random.rand

        def noise(key: Tensor) -> Tensor:
            return draw(key, noise_shape)[:, own]

        def advance(
            parts: list[Tensor],
            ended: list[Tensor],
            action: Tensor,
            next_obs: Tensor,
            final_obs: Tensor,
            reward: Tensor,
            terminated: Tensor,
            truncated: Tensor,
        ) -> tuple[list[Tensor], list[Tensor]]:
            """One step of the envs that also writes the rollout, fused into a few kernels.

            It returns the new positions instead of writing them in place, so readers need not wait.
            """
            env_action = distribution.to_torch_env(action)
            position, outcome = env.transition(join_position(parts), env_action)
            next_obs.copy_(outcome.obs)
            final_obs.copy_(outcome.final_obs)
            reward.copy_(outcome.reward)
            terminated.copy_(outcome.terminated)
            truncated.copy_(outcome.truncated)
            return position_parts(position), with_ended(ended, outcome)

        draw_noise = self._programs.compiled(noise, "the noise of the actions")
        step = self._programs.compiled(advance, f"a step of {type(env).__name__}")

        def rollout() -> None:
            drawn = draw_noise(self._key)
            buffer.obs[0].copy_(buffer.obs[-1])
            held = position_parts(env.position)
            parts, ended = held, self._none_ended
            for t in range(buffer.n_steps):
                inputs = PolicyInput(buffer.obs[t], None, None, None)
                row = drawn[distribution.noise_row(t)]
                agent.sample_batch(inputs, row, out=buffer.action[t])
                parts, ended = step(
                    parts,
                    ended,
                    buffer.action[t],
                    buffer.obs[t + 1],
                    buffer.final_obs[t],
                    buffer.reward[t],
                    buffer.terminated[t],
                    buffer.truncated[t],
                )
            for place, part in zip(held, parts, strict=True):
                place.copy_(part)
            self.totals.copy_(torch.stack(ended).sum(dim=1))

        def without_gradient() -> None:
            with torch.no_grad():
                rollout()

        self._rollout = self._programs.captured(without_gradient, "a rollout")

    def _hold_position(self) -> None:
        """Give the envs their own tensors for their positions: each rollout overwrites them."""
        self.env.position = join_position(
            [part.clone() for part in position_parts(self.env.position)]
        )

    def _mark(self) -> Any:
        """A point in time; on a GPU an event in its stream."""
        if self.env.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self) -> float:
        """Duration of the last rollout; waits for its end."""
        begin, end = self._marks
        if isinstance(begin, float):
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0

    def last_inputs(self, agent: Actor) -> PolicyInput:
        """The policy's input after the last row."""
        if self._buffer is None:
            raise RuntimeError("there is no rollout yet; call collect first")
        return PolicyInput(self._buffer.obs[-1], None, None, None)

    def resize(self, n_envs: int, agent: Actor) -> None:
        raise TypeError("tensor envs cannot change their number")

    def snapshots(self) -> list[bytes]:
        """Empty: the envs are part of ``state_dict``."""
        return []

    def state_dict(self) -> StateDict:
        """Saves the generator as it was before an interrupted rollout."""
        state = self._generator.get_state() if self._state_before is None else self._state_before
        position = None
        obs = self._obs if self._buffer is None else self._buffer.obs[-1]
        if self.is_between_rollouts and obs is not None:
            # Copy on the CPU too: the next rollout overwrites the buffer.
            obs = obs.to("cpu", copy=True)
            position = {"envs": self.env.state_dict(), "obs": obs}
        return {"generator": state, "n_steps": self.n_steps, "position": position}

    def load_state_dict(self, state: StateDict) -> None:
        self._generator.set_state(state["generator"])
        self.n_steps = state["n_steps"]

    def resume_at(self, position: Any, snapshots: Sequence[bytes], agent: Actor) -> None:
        """Continue within the saved episodes."""
        if not isinstance(position, dict):
            raise ValueError(
                "the checkpoint holds no env positions, or those of another kind of env"
            )
        self.env.load_state_dict(position["envs"])
        self._hold_position()
        self._obs = position["obs"].to(self.env.device)
        self._buffer = None  # an earlier program reads the envs at another address
