"""DeviceVectorEnv and TorchVectorEnv: a batch of envs whose tensors stay on the device.

A DeviceVectorEnv takes and returns tensors. TorchVectorEnv is one that torch computes, and
``jax_env.JaxVectorEnv`` one that JAX computes.

A task of a TorchVectorEnv defines three pure functions on tensors: ``begin``, ``advance`` and
``observe``. The base class turns them into a Gymnasium VectorEnv. Its ``transition`` is one step of
all envs as a pure function, for rollouts that are compiled or captured in a CUDA graph. It never
synchronises with the device.

Env i of seed s draws its episodes from (s + i, number of the episode). So its episodes are equal on
every device and in a batch of any size. Workers must not import this module: it imports torch.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
from ml_pipeline.envs.kinds import AnyEnv, AnySpace, Info
from ml_pipeline.records import StateDict

EnvState = tuple[Tensor, ...]
ObsTree = Any  # a tensor, or a dict or tuple of them in the form of the observation space

MASK_KEY = "action_mask"  # in infos
_MAX_SEED = 2**62  # seed + i must stay an int64


class Position(NamedTuple):
    """The current step of all envs: everything needed to continue from it."""

    state: EnvState  # defined by the task, [n_envs, ...] each
    n_steps: Tensor  # [n_envs] int64, in the current episode
    episode_return: Tensor  # [n_envs] float32, of the current episode so far
    n_episodes: Tensor  # [n_envs] int64, started since the seed; determines the next start


class StepResult(NamedTuple):
    """The result of one step of all envs."""

    obs: ObsTree  # [n_envs, *obs] each, after the autoreset
    reward: Tensor  # [n_envs] float32
    terminated: Tensor  # [n_envs] bool
    truncated: Tensor  # [n_envs] bool; as in Gymnasium, both can be true
    final_obs: ObsTree  # before the autoreset; differs if the episode ended
    episode_return: Tensor  # [n_envs] float32 of the episode, this step included
    episode_length: Tensor  # [n_envs] int64, this step included
    # [n_envs, n] bool, the actions that ``obs`` and ``final_obs`` allow; None: all, always
    action_mask: Tensor | None = None
    final_mask: Tensor | None = None


class DeviceVectorEnv(VectorEnv[Tensor, Tensor, Tensor], ABC):
    """A Gymnasium VectorEnv whose arrays are tensors on ``device``, with same-step autoreset.

    ``step`` and ``reset`` update ``position``. Shape, dtype and device of actions are checked, but
    not their values: that would wait for the device.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as in Gymnasium

    # A subclass also defines single_observation_space and single_action_space.
    max_episode_steps: int | None = None  # None: no time limit
    # Of a two-player task, by name: observations [N, *obs] -> actions [N, *act].
    scripted_players: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}
    # Names and first values of what ``set_attr`` may change. Each is an attribute, a tensor
    # [n_envs] float32. A new episode copies it, and keeps its value.
    settings: ClassVar[Mapping[str, float]] = {}
    # Why torch cannot compile a step or capture it in a CUDA graph, for the user; None: it can.
    why_no_graph: ClassVar[str | None] = None
    position: Position
    # Whether infos of ``reset`` and ``step`` have an action_mask, [n_envs, n] bool.
    has_action_masks = False

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        """``max_episode_steps=None``: the task's own limit. ``seed=None``: a random seed."""
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        if max_episode_steps is not None:
            if max_episode_steps < 1:
                raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
            self.max_episode_steps = max_episode_steps
        self.num_envs = num_envs
        # A space has a random generator, which instances must not share.
        self.single_observation_space = copy.deepcopy(self.single_observation_space)
        self.single_action_space = copy.deepcopy(self.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.seeds = torch.zeros(num_envs, dtype=torch.int64, device=device)  # [n_envs]
        self.device = self.seeds.device  # "cuda:0", not "cuda": tensors report the index
        self._set_seed(int.from_bytes(os.urandom(6), "big") if seed is None else seed)
        for name, value in self.settings.items():
            setattr(self, name, torch.full((num_envs,), float(value), device=device))
        self._needs_reset = True

    @abstractmethod
    def transition(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step of all envs; after an episode ends, the next one starts in the same step."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Tensors on the CPU; an env that loads them continues exactly from here."""

    @abstractmethod
    def load_state_dict(self, saved: StateDict) -> None: ...

    @classmethod
    @abstractmethod
    def single_env(cls, **kwargs: Any) -> AnyEnv:
        """One env of this task as a plain Gymnasium env, for evaluation, video, export and play."""

    def set_attr(self, name: str, values: object) -> None:
        """Change a setting of the task: one number, or one per env."""
        if name not in self.settings:
            known = ", ".join(self.settings) or "none"
            raise ValueError(f"{name}: {type(self).__name__} has no such setting; it has: {known}")
        # In place: a captured CUDA graph reads the setting at this address.
        getattr(self, name).copy_(torch.as_tensor(values, dtype=torch.float32))

    def _check_call(self, actions: Tensor) -> None:
        """Refuse a step before the first reset, and actions of another form."""
        if self._needs_reset:
            raise ResetNeeded("step was called before the first reset; call reset first")
        self._check_action(self.single_action_space, actions)

    def _set_seed(self, seed: int) -> None:
        if not 0 <= seed < _MAX_SEED:
            raise ValueError(f"seed must be between 0 and 2^62 - 1, got {seed}")
        # In place: a captured CUDA graph reads the seeds at this address.
        self.seeds.copy_(torch.arange(self.num_envs, device=self.device) + seed)

    def _check_number(self, saved: StateDict) -> None:
        n_saved = len(saved["seeds"])
        if n_saved != self.num_envs:
            raise ValueError(
                f"num_envs={self.num_envs}: the saved state has {n_saved} envs; "
                f"use num_envs={n_saved}"
            )

    def _check_action(self, space: AnySpace, action: Any) -> None:
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            kind: type[Any] = dict if isinstance(space, spaces.Dict) else tuple
            if not isinstance(action, kind) or len(action) != len(space):
                raise ValueError(f"actions must be one tensor for each part of {space}")
            for name, part in space.items() if isinstance(space, spaces.Dict) else enumerate(space):
                self._check_action(part, action[name])
            return
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


class TorchVectorEnv(DeviceVectorEnv):
    """Tensor envs of a task; ``transition`` is one step of all envs as a pure function.

    ``step`` and ``reset`` update ``position``; ``transition`` does not.
    """

    n_draws: int  # random numbers that the start of an episode needs
    gymnasium_id: ClassVar[str | None] = None  # the Gymnasium env with the same dynamics

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        """``max_episode_steps=None``: the task's own limit. ``seed=None``: a random seed."""
        super().__init__(num_envs, device=device, seed=seed, max_episode_steps=max_episode_steps)
        # Placeholders with the right shapes until the first reset.
        n_episodes = torch.zeros_like(self.seeds)
        self.position = self._start(n_episodes)._replace(n_episodes=n_episodes)
        self.has_action_masks = self.action_mask(self.position.state) is not None

    @abstractmethod
    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        """The first state of an episode; ``draws``: ``n_draws`` tensors [N], uniform in [0, 1)."""

    @abstractmethod
    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        """One step of every env: the next state, reward [N] float32, terminated [N] bool.

        ``action`` is a dict or tuple of tensors if the action space is a Dict or Tuple.
        Like ``begin`` and ``observe`` it must be pure: no in-place operations, no values read in
        Python, no float64 (MPS does not support it). It may be traced once and replayed.
        """

    @abstractmethod
    def observe(self, state: EnvState) -> ObsTree:
        """Observations [N, *obs], with the dtype of the observation space.

        A dict or tuple of tensors, with one for each part, if the observation space is a Dict or
        Tuple.
        """

    def action_mask(self, state: EnvState) -> Tensor | None:
        """The actions that are allowed next, [N, n] bool; None: all of them, always.

        It has an entry per choice; those of several parts of an action follow each other.
        """
        return None

    def outcome(self, state: EnvState) -> dict[str, Tensor]:
        """What ``step`` reports of an ended episode, from its last state: [N, ...] by name."""
        return {}

    def shaped(
        self,
        reward: Tensor,
        state: EnvState,
        action: Tensor,
        next_state: EnvState,
        terminated: Tensor,
    ) -> Tensor:
        """The reward to learn from, [N] float32; episode returns and evaluations keep ``reward``.

        Like ``advance`` it must be pure.
        """
        return reward

    def transition(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step of all envs; after an episode ends, the next one starts in the same step."""
        return self._autoreset(*self._advance_shaped(position, action))

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Tensor, Info]:
        """Start an episode in every env: the first of ``seed``, or the next of the current seed."""
        if options:
            raise ValueError(f"{type(self).__name__} takes no options for reset, got {options}")
        super().reset(seed=seed)
        n_episodes = self.position.n_episodes
        if seed is not None:
            self._set_seed(seed)
            n_episodes = torch.zeros_like(n_episodes)
        with torch.no_grad():
            self.position = self._start(n_episodes)
            self._needs_reset = False
            mask = self.action_mask(self.position.state)
            infos = {} if mask is None else {MASK_KEY: mask}
            return self.observe(self.position.state), infos

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Info]:
        """``infos``: final_obs and episode (r, l) of every env, with masks of ended episodes.

        ``final_info`` has the task's ``outcome``, if it defines one. With action masks, infos and
        ``final_info`` have an action_mask.
        """
        self._check_call(actions)
        with torch.no_grad():
            position, result = self._advance_shaped(self.position, actions)
            done = result.terminated | result.truncated
            outcome = self.outcome(position.state)
            # On the CPU this check is cheap and saves random draws; on a GPU it would synchronise.
            if self.device.type != "cpu" or bool(done.any()):
                position, result = self._autoreset(position, result)
            self.position = position
        infos = infos_of(result)
        if result.final_mask is not None:
            outcome = {MASK_KEY: result.final_mask, **outcome}
        if outcome:
            masks = {f"_{name}": done for name in outcome}
            infos |= {"final_info": {**outcome, **masks}, "_final_info": done}
        return result.obs, result.reward, result.terminated, result.truncated, infos

    def state_dict(self) -> StateDict:
        """Tensors on the CPU; an env that loads them continues exactly from here."""
        return {
            "seeds": _saved(self.seeds),
            "state": [_saved(part) for part in self.position.state],
            "n_steps": _saved(self.position.n_steps),
            "episode_return": _saved(self.position.episode_return),
            "n_episodes": _saved(self.position.n_episodes),
        }

    def load_state_dict(self, saved: StateDict) -> None:
        self._check_number(saved)
        wanted = [tuple(part.shape) for part in self.position.state]
        found = [tuple(part.shape) for part in saved["state"]]
        if found != wanted:
            raise ValueError(
                f"{type(self).__name__} has state shapes {wanted}, but the saved ones are {found}; "
                "load it into the task that saved it"
            )
        # In place: a captured CUDA graph reads the seeds at this address.
        self.seeds.copy_(saved["seeds"])
        self.position = Position(
            state=tuple(self._loaded(part) for part in saved["state"]),
            n_steps=self._loaded(saved["n_steps"]),
            episode_return=self._loaded(saved["episode_return"]),
            n_episodes=self._loaded(saved["n_episodes"]),
        )
        self._needs_reset = False

    @classmethod
    def single_env(cls, **kwargs: Any) -> AnyEnv:
        """One env of this task as a plain Gymnasium env, for evaluation, video, export and play.

        This is Gymnasium's own env if the task has a ``gymnasium_id``.
        """
        if cls.gymnasium_id is not None:
            return gym.make(cls.gymnasium_id, **kwargs)
        return SingleTorchEnv(cls, **kwargs)

    def _advance_shaped(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step without autoreset, with the reward to learn from."""
        after, result = self._advance_all(position, action)
        reward = self.shaped(result.reward, position.state, action, after.state, result.terminated)
        # torch 2.6 cannot compile _replace.
        return after, StepResult(result.obs, reward, *result[2:])

    def _advance_all(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        """One step without autoreset, with the reward of the task."""
        state, reward, terminated = self.advance(position.state, action)
        n_steps = position.n_steps + 1
        episode_return = position.episode_return + reward
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(terminated)
        else:
            truncated = n_steps >= self.max_episode_steps
        obs, mask = self.observe(state), self.action_mask(state)
        totals = episode_return, n_steps
        result = StepResult(obs, reward, terminated, truncated, obs, *totals, mask, mask)
        return Position(state, n_steps, episode_return, position.n_episodes), result

    def _autoreset(self, position: Position, result: StepResult) -> tuple[Position, StepResult]:
        """Start the next episode of every env whose episode ended; uses masks, not indices."""
        done = result.terminated | result.truncated
        fresh = self.begin(self._draws(position.n_episodes))
        pairs = zip(fresh, position.state, strict=True)
        state = tuple(_choose(done, new, old) for new, old in pairs)
        position = Position(
            state=state,
            n_steps=position.n_steps.masked_fill(done, 0),
            episode_return=position.episode_return.masked_fill(done, 0.0),
            n_episodes=position.n_episodes + done,
        )
        mask = self.action_mask(state)
        return position, StepResult(self.observe(state), *result[1:7], mask, result.final_mask)

    def _start(self, n_episodes: Tensor) -> Position:
        """Every env at the start of its episode number ``n_episodes``."""
        # Cloned: a part of the state may be a setting, which changes in place, or be used twice,
        # after which torch.compile would compile again.
        state = tuple(part.clone() for part in self.begin(self._draws(n_episodes)))
        episode_return = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        return Position(state, torch.zeros_like(n_episodes), episode_return, n_episodes + 1)

    def _draws(self, n_episodes: Tensor) -> tuple[Tensor, ...]:
        return counter_random.uniform(self.seeds, n_episodes, self.n_draws)

    def _loaded(self, saved: Tensor) -> Tensor:
        return saved.to(self.device, copy=True)


class SingleTorchEnv(gym.Env[Any, object]):
    """One env of a TorchVectorEnv as a plain Gymnasium env with NumPy arrays, on the CPU.

    It does not autoreset. With the same seed, its episodes start like those of env 0 of the batch.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    def __init__(
        self, task: type[TorchVectorEnv], *, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        if render_mode is not None:
            raise ValueError(
                f"render_mode={render_mode!r}: {task.__name__} cannot be rendered; "
                "give the task a gymnasium_id of an env that can"
            )
        self._env = task(1, device="cpu", **kwargs)
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        obs, infos = self._env.reset(seed=seed, options=options)
        return _first(obs), _masks_of_one(infos.get(MASK_KEY))

    def step(self, action: object) -> tuple[Any, float, bool, bool, Info]:
        batch = _batch_of_one(self.action_space, action)
        with torch.no_grad():
            self._env.position, result = self._env._advance_all(self._env.position, batch)
        terminated, truncated = bool(result.terminated), bool(result.truncated)
        info = _masks_of_one(result.final_mask)
        return _first(result.final_obs), float(result.reward), terminated, truncated, info


def _batch_of_one(space: AnySpace, action: Any) -> Any:
    """The action of one env as tensors [1, *act]."""
    if isinstance(space, spaces.Dict):
        return {name: _batch_of_one(part, action[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_batch_of_one(part, each) for part, each in zip(space, action, strict=True))
    dtype = torch.float32 if isinstance(space, spaces.Box) else torch.int64
    batch, shape = torch.as_tensor(np.asarray(action), dtype=dtype), (1, *(space.shape or ()))
    if batch.numel() != math.prod(shape):
        raise ValueError(f"action must be in {space}, got shape {batch.shape}")
    return batch.reshape(shape)


def _choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *[1] * (new.dim() - 1)), new, old)


def _saved(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _first(batch: ObsTree) -> Any:
    """The row of env 0 as arrays."""
    if isinstance(batch, dict):
        return {name: _first(part) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_first(part) for part in batch)
    return batch[0].numpy().copy()


def _masks_of_one(mask: Tensor | None) -> Info:
    """The info of one env."""
    return {} if mask is None else {MASK_KEY: _first(mask)}


def infos_of(result: StepResult) -> Info:
    """What a vector env reports besides: final observations and episodes, with their masks."""
    done = result.terminated | result.truncated
    return {
        **({} if result.action_mask is None else {MASK_KEY: result.action_mask}),
        "final_obs": result.final_obs,
        "_final_obs": done,
        "episode": {"r": result.episode_return, "l": result.episode_length},
        "_episode": done,
    }


def position_parts(position: Position) -> list[Tensor]:
    return [*position.state, *position[1:]]


def join_position(parts: list[Tensor]) -> Position:
    return Position(tuple(parts[:-3]), *parts[-3:])


def with_ended(ended: list[Tensor], outcome: StepResult) -> list[Tensor]:
    """Number, returns and lengths of ended episodes per env, added to ``ended``."""
    done = outcome.terminated | outcome.truncated
    values = (torch.ones_like(outcome.reward), outcome.episode_return, outcome.episode_length)
    return [old + torch.where(done, new, 0.0) for old, new in zip(ended, values, strict=True)]
