"""TorchVectorEnv: a batch of envs as tensors that never leave the device.

A task writes three pure functions on tensors (``begin``, ``advance``, ``observe``); this file makes
a Gymnasium VectorEnv of them, and ``transition``, one step of all envs as a pure function, for
whoever compiles a rollout or captures it in a CUDA graph. Nothing here waits for the host.

Env i of seed s draws its episodes by (s + i, number of the episode), so it plays the same on every
device and among any number of envs. Workers must not import this file: it brings torch.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from ml_pipeline import counter_random

EnvState = tuple[Tensor, ...]

_MAX_SEED = 2**62  # seed + i must stay an int64


class Position(NamedTuple):
    """Where all envs stand: everything that goes on from here."""

    state: EnvState  # the task's own, [n_envs, ...] each
    n_steps: Tensor  # [n_envs] int64, of the episode so far
    episode_return: Tensor  # [n_envs] float32, so far
    n_episodes: Tensor  # [n_envs] int64, begun since the seed: the next beginning is drawn by it


class StepResult(NamedTuple):
    """What one step of all envs has brought."""

    obs: Tensor  # [n_envs, *obs] after the autoreset
    reward: Tensor  # [n_envs] float32
    terminated: Tensor  # [n_envs] bool
    truncated: Tensor  # [n_envs] bool; as in Gymnasium, both may hold on the last step
    final_obs: Tensor  # [n_envs, *obs] before the autoreset: differs where the episode ended
    episode_return: Tensor  # [n_envs] float32 of the episode, this step included
    episode_length: Tensor  # [n_envs] int64, likewise


class TorchVectorEnv(VectorEnv[Tensor, Tensor, Tensor], ABC):
    """A Gymnasium VectorEnv whose arrays are tensors on ``device``, with same-step autoreset.

    ``step`` and ``reset`` keep ``position``; ``transition`` leaves it alone. The values of actions
    are not checked, since that would wait for the device: only their shape, dtype and device are.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as in Gymnasium

    # What a task says of itself, beside its three functions and its two single spaces.
    n_draws: ClassVar[int]  # random numbers that a beginning takes
    twin: ClassVar[str | None] = None  # the id of the Gymnasium env that it equals
    max_episode_steps: int | None = None  # None: episodes have no time limit

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        """``max_episode_steps=None`` is the task's own limit; ``seed=None`` draws one."""
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        if max_episode_steps is not None:
            if max_episode_steps < 1:
                raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
            self.max_episode_steps = max_episode_steps
        self.num_envs = num_envs
        # Spaces own a generator, which instances must not share.
        self.single_observation_space = copy.deepcopy(self.single_observation_space)
        self.single_action_space = copy.deepcopy(self.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.seeds = torch.zeros(num_envs, dtype=torch.int64, device=device)  # [n_envs]
        self.device = self.seeds.device  # with its index: "cuda" has none, tensors have
        self._set_seed(int.from_bytes(os.urandom(6), "big") if seed is None else seed)
        # Until the first reset a beginning of the right shapes, which no episode has begun with.
        n_episodes = torch.zeros_like(self.seeds)
        self.position = self._begun(n_episodes)._replace(n_episodes=n_episodes)
        self._needs_reset = True

    @abstractmethod
    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        """The first state of an episode per env; ``n_draws`` tensors [N], uniform in [0, 1)."""

    @abstractmethod
    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        """One step of every env: the next state, reward [N] float32, terminated [N] bool.

        Like ``begin`` and ``observe`` it is pure: nothing in place, nothing read by the host, no
        float64 (MPS has none). It may be traced once and replayed.
        """

    @abstractmethod
    def observe(self, state: EnvState) -> Tensor:
        """[N, *obs], of the dtype of the observation space."""

    def transition(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step of all envs; those whose episode ends begin the next one in the same step."""
        return self._begin_anew(*self._move(position, action))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Begins an episode in every env: the first one of ``seed``, or the next of this seed."""
        if options:
            raise ValueError(f"{type(self).__name__} takes no options for reset, got {options}")
        super().reset(seed=seed)
        n_episodes = self.position.n_episodes
        if seed is not None:
            self._set_seed(seed)
            n_episodes = torch.zeros_like(n_episodes)
        with torch.no_grad():
            self.position = self._begun(n_episodes)
            self._needs_reset = False
            return self.observe(self.position.state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """``infos``: final_obs and episode (r, l) of every env, and masks of those that ended."""
        if self._needs_reset:
            raise ResetNeeded("step was called before the first reset; call reset first")
        self._check_action(actions)
        with torch.no_grad():
            position, outcome = self._move(self.position, actions)
            done = outcome.terminated | outcome.truncated
            # On the CPU a look costs nothing and saves the drawing; elsewhere it would wait.
            if self.device.type != "cpu" or bool(done.any()):
                position, outcome = self._begin_anew(position, outcome)
            self.position = position
        infos = {
            "final_obs": outcome.final_obs,
            "_final_obs": done,
            "episode": {"r": outcome.episode_return, "l": outcome.episode_length},
            "_episode": done,
        }
        return outcome.obs, outcome.reward, outcome.terminated, outcome.truncated, infos

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors on the CPU; an env that loads them goes on exactly from here."""
        return {
            "seeds": _saved(self.seeds),
            "state": [_saved(part) for part in self.position.state],
            "n_steps": _saved(self.position.n_steps),
            "episode_return": _saved(self.position.episode_return),
            "n_episodes": _saved(self.position.n_episodes),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        n_saved = len(saved["seeds"])
        if n_saved != self.num_envs:
            raise ValueError(
                f"the state of {n_saved} envs cannot be loaded into {self.num_envs}; "
                f"use num_envs={n_saved}"
            )
        wanted = [tuple(part.shape) for part in self.position.state]
        found = [tuple(part.shape) for part in saved["state"]]
        if found != wanted:
            raise ValueError(
                f"{type(self).__name__} has a state of shapes {wanted}, the saved one has {found}; "
                "load it into the task that saved it"
            )
        # In place, like every change of the seeds: a captured graph reads them where they are.
        self.seeds.copy_(saved["seeds"])
        self.position = Position(
            state=tuple(self._loaded(part) for part in saved["state"]),
            n_steps=self._loaded(saved["n_steps"]),
            episode_return=self._loaded(saved["episode_return"]),
            n_episodes=self._loaded(saved["n_episodes"]),
        )
        self._needs_reset = False

    @classmethod
    def single_env(cls, **kwargs: Any) -> gym.Env[Any, Any]:
        """One env of this task as a plain Gymnasium env, for evaluation, video, export and play.

        The twin where there is one, so that what is reported was played in Gymnasium's own env.
        """
        if cls.twin is not None:
            return gym.make(cls.twin, **kwargs)
        return SingleTorchEnv(cls, **kwargs)

    def _move(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step without the autoreset: ended episodes stand at their end."""
        state, reward, terminated = self.advance(position.state, action)
        n_steps = position.n_steps + 1
        episode_return = position.episode_return + reward
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(terminated)
        else:
            truncated = n_steps >= self.max_episode_steps
        obs = self.observe(state)
        outcome = StepResult(obs, reward, terminated, truncated, obs, episode_return, n_steps)
        return Position(state, n_steps, episode_return, position.n_episodes), outcome

    def _begin_anew(self, position: Position, outcome: StepResult) -> tuple[Position, StepResult]:
        """The autoreset, by masks; where no episode has ended it changes nothing."""
        done = outcome.terminated | outcome.truncated
        fresh = self.begin(self._draws(position.n_episodes))
        pairs = zip(fresh, position.state, strict=True)
        state = tuple(_choose(done, new, old) for new, old in pairs)
        position = Position(
            state=state,
            n_steps=position.n_steps.masked_fill(done, 0),
            episode_return=position.episode_return.masked_fill(done, 0.0),
            n_episodes=position.n_episodes + done,
        )
        return position, outcome._replace(obs=self.observe(state))

    def _begun(self, n_episodes: Tensor) -> Position:
        """Every env at the beginning of the episode of this number."""
        state = self.begin(self._draws(n_episodes))
        episode_return = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        return Position(state, torch.zeros_like(n_episodes), episode_return, n_episodes + 1)

    def _draws(self, n_episodes: Tensor) -> tuple[Tensor, ...]:
        return counter_random.uniform(self.seeds, n_episodes, self.n_draws)

    def _set_seed(self, seed: int) -> None:
        if not 0 <= seed < _MAX_SEED:
            raise ValueError(f"a seed must be between 0 and 2^62 - 1, got {seed}")
        # In place: a captured graph reads the seeds where they are.
        self.seeds.copy_(torch.arange(self.num_envs, device=self.device) + seed)

    def _check_action(self, action: Any) -> None:
        space = self.single_action_space
        shape = (self.num_envs, *(space.shape or ()))
        is_real = isinstance(space, spaces.Box)
        wanted = f"actions must be a tensor {shape} of "
        wanted += "float32" if is_real else "integers"
        wanted += f" on {self.device}"
        if not isinstance(action, Tensor):
            raise ValueError(f"{wanted}, got {type(action).__name__}; use torch.as_tensor")
        right_dtype = (
            action.dtype == torch.float32
            if is_real
            else not (action.is_floating_point() or action.is_complex())
        )
        if action.shape != shape or action.device != self.device or not right_dtype:
            raise ValueError(
                f"{wanted}, got {tuple(action.shape)} of {action.dtype} on {action.device}"
            )

    def _loaded(self, saved: Tensor) -> Tensor:
        return saved.to(self.device, copy=True)


class SingleTorchEnv(gym.Env[Any, Any]):
    """One env of a TorchVectorEnv as a plain Gymnasium env: NumPy at its border, on the CPU.

    An ended episode stays at its end until ``reset``. Seeded alike, its episodes begin as those
    of env 0 of the batch do.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    def __init__(
        self, task: type[TorchVectorEnv], *, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        if render_mode is not None:
            raise ValueError(
                f"{task.__name__} cannot be drawn, got render_mode={render_mode!r}; "
                "give the task a twin in Gymnasium that can"
            )
        self._env = task(1, device="cpu", **kwargs)
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space
        self._shape = self._env.action_space.shape
        self._action_dtype = (
            torch.float32 if isinstance(self.action_space, spaces.Box) else torch.int64
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        obs, _ = self._env.reset(seed=seed, options=options)
        return _row(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        batch = torch.as_tensor(np.asarray(action), dtype=self._action_dtype)
        if batch.numel() != math.prod(self._shape or ()):
            raise ValueError(f"action must be of {self.action_space}, got shape {batch.shape}")
        with torch.no_grad():
            self._env.position, outcome = self._env._move(
                self._env.position, batch.reshape(self._shape or ())
            )
        terminated, truncated = bool(outcome.terminated), bool(outcome.truncated)
        return _row(outcome.final_obs), float(outcome.reward), terminated, truncated, {}


def _choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *[1] * (new.dim() - 1)), new, old)


def _saved(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _row(batch: Tensor) -> Any:
    return batch[0].numpy().copy()
