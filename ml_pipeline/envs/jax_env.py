"""JaxVectorEnv: envs written in JAX as a batch of tensor envs, whose state never leaves JAX.

One jitted function steps all envs and resets those that ended. Actions, observations, rewards and
flags cross between torch and JAX by DLPack, which copies nothing and orders the work of their
streams on a GPU. Each env has a key of its own: env i of seed s starts from the key of s + i. So
its episodes do not depend on the number of envs.

Workers must not import this module: it imports torch.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

# By default JAX takes three quarters of a GPU's memory, which torch needs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from ml_pipeline.envs.kinds import AnyEnv, Info
from ml_pipeline.envs.tensor_env import (
    MASK_KEY,
    DeviceVectorEnv,
    Position,
    StepResult,
    infos_of,
)
from ml_pipeline.errors import first_line, place_of
from ml_pipeline.records import StateDict

# It reports every kind of device that the machine does not have.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)

Array = Any  # a jax.Array, or a tracer in its place
State = Any  # a tree of arrays, of one env or of all


class Carry(NamedTuple):
    """The current step of all envs, in JAX."""

    state: State  # as the task returns it, [n_envs, ...] each
    key: Array  # [n_envs, 2] uint32
    n_steps: Array  # [n_envs] int32, in the current episode
    episode_return: Array  # [n_envs] float32, of the current episode so far


class JaxVectorEnv(DeviceVectorEnv):
    """A task in JAX defines an action space, and ``begin`` and ``advance`` of one env.

    The observation space is found out if the task does not set one.
    """

    why_no_graph = "JAX steps the envs"
    # A reset may cost more than many steps. So only envs that ended are reset, this share of all
    # at a time; with 1, all are reset in every step, and those that ended use it.
    reset_share: ClassVar[float] = 1 / 16

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        """``max_episode_steps=None``: the task's own limit. ``seed=None``: a random seed."""
        self._check_task()
        super().__init__(num_envs, device=device, seed=seed, max_episode_steps=max_episode_steps)
        self._home = jax_device(self.device)
        self._carry: Carry | None = None
        self._starts = jax.jit(jax.vmap(self._start_one))
        self._masks_now = jax.jit(self._masks)
        # Donated: the next state may overwrite the one before.
        self._steps = jax.jit(partial(self._step_all, resets=True), donate_argnums=0)
        self._steps_once = jax.jit(partial(self._step_all, resets=False))  # without autoreset
        # Positions are in JAX.
        nothing = torch.zeros(0, device=self.device)
        self.position = Position((), nothing, nothing, nothing)

    @abstractmethod
    def begin(self, key: Array) -> tuple[State, Any]:
        """State and observation of an env at the start of an episode.

        An observation is an array, or a tree of arrays, which are joined into one vector.
        """

    @abstractmethod
    def advance(
        self, key: Array, state: State, action: Array
    ) -> tuple[State, Any, Array, Array, Array]:
        """The next state, observation, reward, terminated and truncated of an env.

        ``action`` is int32 for discrete actions and float32 for others. Without autoreset: the
        observation is that of the last step, also if the episode ended.
        """

    def action_mask(self, state: State) -> Array | None:
        """The actions that an env allows next, [n] bool; None: all of them, always."""
        return None

    def transition(self, position: Position, action: Tensor) -> tuple[Position, StepResult]:
        if self._carry is None:
            raise RuntimeError("step was called before the first reset; call reset first")
        self._carry, results = self._steps(self._carry, self._to_jax(action))
        tensors = [None if each is None else to_torch(each) for each in results]
        return position, StepResult(*tensors)  # type: ignore[arg-type]  # only masks are None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Tensor, Info]:
        """Start an episode in every env: the first of ``seed``, or the next of the current seed."""
        if options:
            raise ValueError(f"{type(self).__name__} takes no options for reset, got {options}")
        super().reset(seed=seed)
        if self.device.type == "cuda":
            # JAX may use the memory of earlier results again. Before a step, it waits for torch by
            # the actions; a reset has none.
            torch.cuda.current_stream(self.device).synchronize()
        if seed is not None:
            self._set_seed(seed)
        continues = seed is None and self._carry is not None
        keys = cast("Carry", self._carry).key if continues else self._first_keys()
        self._carry, obs = self._starts(keys)
        self._needs_reset = False
        mask = self._masks_now(self._carry.state)
        return to_torch(obs), {} if mask is None else {MASK_KEY: to_torch(mask)}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Info]:
        """``infos``: final_obs and episode (r, l) of every env, with masks of ended episodes."""
        self._check_call(actions)
        _, result = self.transition(self.position, actions)
        return result.obs, result.reward, result.terminated, result.truncated, infos_of(result)

    def state_dict(self) -> StateDict:
        if self._carry is None:
            raise RuntimeError("the envs have no state before the first reset; call reset first")
        # By their places, because the text of a tree may have addresses in it.
        leaves = {name: to_torch(leaf).to("cpu", copy=True) for name, leaf in packed(self._carry)}
        return {"seeds": self.seeds.to("cpu", copy=True), "leaves": leaves}

    def load_state_dict(self, saved: StateDict) -> None:
        self._check_number(saved)
        leaves = [leaf.numpy() for leaf in saved["leaves"].values()]
        own = packed(jax.eval_shape(self._starts, self._first_keys())[0])
        wanted = [(name, leaf.shape, str(leaf.dtype)) for name, leaf in own]
        pairs = zip(saved["leaves"], leaves, strict=True)
        if wanted != [(name, leaf.shape, str(leaf.dtype)) for name, leaf in pairs]:
            raise ValueError(
                f"{type(self).__name__} has another state than the saved one; use the version of "
                "the library, and the settings, that saved it"
            )
        self.seeds.copy_(saved["seeds"])
        self._carry = self.unpacked(leaves)
        self._needs_reset = False

    def unpacked(self, leaves: Sequence[NDArray[Any]]) -> Carry:
        """The carry of the arrays that ``packed`` returned."""

        def typed(arrays: list[Array]) -> Carry:
            like = jax.vmap(self._start_one)(self._first_keys())[0]  # traced, and never computed
            tree = jax.tree.unflatten(jax.tree.structure(like), arrays)
            return cast("Carry", jax.tree.map(_typed, like, tree))

        copies = [jax.device_put(np.array(leaf), self._home) for leaf in leaves]
        return cast("Carry", jax.jit(typed)(copies))

    @classmethod
    def single_env(cls, **kwargs: Any) -> AnyEnv:
        return SingleJaxEnv(cls, **kwargs)

    def _check_task(self) -> None:
        """Find out the observation space; refuse functions that do not fit their description."""
        name, key = type(self).__name__, _keys(np.zeros(1, np.int64))[0]
        if not isinstance(getattr(self, "single_action_space", None), spaces.Space):
            raise ValueError(f"{name} has no single_action_space; set it to a Gymnasium space")
        with _errors_of(name, "begin"):
            carry, obs = jax.eval_shape(self._start_one, key)
        if not hasattr(self, "single_observation_space"):
            self.single_observation_space = _space_of(obs)
        with _errors_of(name, "action_mask"):
            self.has_action_masks = jax.eval_shape(self.action_mask, carry.state) is not None
        action = np.zeros(self.single_action_space.shape or (), _action_dtype(self))
        with _errors_of(name, "advance"):
            after, _, *numbers = jax.eval_shape(self._advance_one, key, carry.state, action)
        if any(each.shape for each in numbers):
            raise ValueError(
                f"{name}.advance must return reward, terminated and truncated as one number each; "
                f"their shapes are {', '.join(str(each.shape) for each in numbers)}"
            )
        before, now = _described(carry.state), _described(after)
        if before != now:
            lost, new = ", ".join(before - now) or "nothing", ", ".join(now - before) or "nothing"
            raise ValueError(
                f"{name}.advance must return a state of the form that begin returns; "
                f"it has {new} in the place of {lost}"
            )

    def _start_one(self, key: Array) -> tuple[Carry, Array]:
        key, begin_key = jax.random.split(key)
        state, obs = self._begin_one(begin_key)
        return Carry(state, key, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)), obs

    def _begin_one(self, key: Array) -> tuple[State, Array]:
        state, obs = self.begin(key)
        return jax.tree.map(_strong, state), _joined(obs)

    def _masks(self, state: State) -> Array | None:
        """The action masks of all envs, [n_envs, n]."""
        mask = jax.vmap(self.action_mask)(state)
        return None if mask is None else jnp.asarray(mask, bool)

    def _advance_one(
        self, key: Array, state: State, action: Array
    ) -> tuple[State, Array, Array, Array, Array]:
        state, obs, reward, terminated, truncated = self.advance(key, state, action)
        reward = jnp.asarray(reward, jnp.float32)
        flags = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
        return jax.tree.map(_strong, state), _joined(obs), reward, *flags

    def _step_all(self, carry: Carry, action: Array, resets: bool) -> tuple[Carry, StepArrays]:
        # As in the usual loop around a library: one split per step, and one in it.
        keys = jax.vmap(jax.random.split)(carry.key)
        inner_keys = jax.vmap(jax.random.split)(keys[:, 1])
        advanced = jax.vmap(self._advance_one)(inner_keys[:, 0], carry.state, action)
        state, final_obs, reward, terminated, truncated = advanced
        n_steps = carry.n_steps + 1
        if self.max_episode_steps is not None:
            truncated = truncated | (n_steps >= self.max_episode_steps)
        total, done, obs = carry.episode_return + reward, terminated | truncated, final_obs
        after = Carry(state, keys[:, 0], n_steps, total)
        mask = final_mask = self._masks(state)
        if resets:
            state, obs = self._restarted(done, inner_keys[:, 1], state, final_obs)
            after = Carry(
                state, keys[:, 0], jnp.where(done, 0, n_steps), jnp.where(done, 0.0, total)
            )
            mask = self._masks(state)
        ends = reward, terminated, truncated, final_obs, total, n_steps
        return after, StepArrays(obs, *ends, mask, final_mask)

    def _restarted(self, done: Array, keys: Array, state: State, obs: Array) -> tuple[State, Array]:
        """State and observations with new episodes in the envs that have ended."""
        begin = jax.vmap(self._begin_one)
        if self.reset_share >= 1:
            chosen: tuple[State, Array]
            chosen = jax.tree.map(partial(_chosen, done), begin(keys), (state, obs))
            return chosen
        n_envs = len(done)
        size = max(int(n_envs * self.reset_share), 1)
        # The envs that ended come first; the rest is out of bounds and is dropped.
        (ended,) = jnp.nonzero(done, size=n_envs + size, fill_value=n_envs)

        def some(loop: tuple[Array, Any]) -> tuple[Array, Any]:
            first, trees = loop
            index = jax.lax.dynamic_slice(ended, (first,), (size,))
            fresh = begin(keys[index])
            placed = jax.tree.map(partial(_placed, index), trees, fresh)
            return first + size, placed

        n_ended = done.sum()
        start = jnp.zeros((), n_ended.dtype), (state, obs)
        _, (state, obs) = jax.lax.while_loop(lambda loop: loop[0] < n_ended, some, start)
        return state, obs

    def _first_keys(self) -> Array:
        return jax.device_put(_keys(self.seeds.cpu().numpy()), self._home)

    def _to_jax(self, action: Tensor) -> Array:
        dtype = torch.float32 if isinstance(self.single_action_space, spaces.Box) else torch.int32
        # A copy, which is aligned as JAX needs it, and stays as it is until JAX has read it.
        return jax.dlpack.from_dlpack(action.detach().to(dtype, copy=True).contiguous())


class StepArrays(NamedTuple):
    """A ``StepResult`` in JAX."""

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Array
    episode_return: Array
    episode_length: Array
    action_mask: Array | None
    final_mask: Array | None


class SingleJaxEnv(gym.Env["NDArray[np.generic]", object]):
    """One env of a task in JAX as a plain Gymnasium env with NumPy arrays, on the CPU.

    It does not autoreset. With the same seed, its episodes start like those of env 0 of the batch.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    # Compiling takes seconds, so envs with the same arguments share a task and its functions.
    _tasks: ClassVar[dict[str, JaxVectorEnv]] = {}

    def __init__(
        self, task: type[JaxVectorEnv], *, render_mode: str | None = None, **kwargs: Any
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"render_mode={render_mode!r}: {task.__name__} cannot be rendered")
        name = f"{task.__module__}.{task.__qualname__} {id(task)} {sorted(kwargs.items())}"
        if name not in self._tasks:
            self._tasks[name] = task(1, device="cpu", **kwargs)
        self._task = self._tasks[name]
        self._carry: Carry | None = None
        self.observation_space = self._task.single_observation_space
        self.action_space = self._task.single_action_space

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[NDArray[np.generic], Info]:
        super().reset(seed=seed)
        if seed is None and self._carry is not None:
            keys = self._carry.key
        else:
            first = int(self.np_random.integers(2**32)) if seed is None else seed
            keys = jax.device_put(_keys(np.array([first])), self._task._home)
        self._carry, obs = self._task._starts(keys)
        return _first(obs), _info_of(self._task._masks_now(self._carry.state))

    def step(self, action: object) -> tuple[NDArray[np.generic], float, bool, bool, Info]:
        if self._carry is None:
            raise gym.error.ResetNeeded("step was called before the first reset; call reset first")
        batch = np.asarray(action, _action_dtype(self._task))[None]
        self._carry, result = self._task._steps_once(self._carry, batch)
        reward, terminated, truncated = result.reward, result.terminated, result.truncated
        flags = terminated.item(), truncated.item()
        return _first(result.final_obs), reward.item(), *flags, _info_of(result.final_mask)

    def get_state(self) -> list[NDArray[Any]] | None:
        return None if self._carry is None else [np.array(leaf) for _, leaf in packed(self._carry)]

    def set_state(self, state: list[NDArray[Any]] | None) -> None:
        self._carry = None if state is None else self._task.unpacked(state)


def packed(carry: Carry) -> list[tuple[str, Array]]:
    """The arrays of a carry and their places in it; keys as their numbers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(carry)
    return [(jax.tree_util.keystr(path), _raw(leaf)) for path, leaf in leaves]


def _info_of(mask: Array | None) -> Info:
    """The info of the first env."""
    return {} if mask is None else {MASK_KEY: _first(mask)}


def _first(batch: Array) -> NDArray[np.generic]:
    # Through NumPy: an index into an array of JAX is a program of its own.
    first: NDArray[np.generic] = np.asarray(batch)[0].copy()
    return first


def to_torch(array: Array) -> Tensor:
    """The same memory as a tensor, which must not be written; torch waits for it."""
    tensor: Tensor = from_dlpack(array)
    return tensor


def jax_device(device: torch.device) -> Any:
    """JAX's name of a device of torch."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: JAX envs run on cpu or cuda")
    try:
        return jax.devices("cpu" if device.type == "cpu" else "gpu")[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"device={device}: this JAX does not have it; install jax[cuda12] or jax[cuda13], or "
            "use device=cpu"
        ) from error


def _keys(seeds: NDArray[np.int64]) -> NDArray[np.uint32]:
    """[n, 2]: ``jax.random.PRNGKey`` of each seed, which may have 64 bits."""
    halves = [seeds >> 32, seeds & 0xFFFFFFFF]
    return np.stack(halves, axis=1).astype(np.uint32)


def _action_dtype(task: JaxVectorEnv) -> Any:
    return np.float32 if isinstance(task.single_action_space, spaces.Box) else np.int32


def _strong(leaf: Array) -> Array:
    """An array of a fixed type: a Python number takes the type of what it meets."""
    leaf = jnp.asarray(leaf)
    return leaf if _is_key(leaf) else jnp.asarray(leaf, leaf.dtype)


def _is_key(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _raw(leaf: Array) -> Array:
    """A key as its numbers."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _typed(like: Array, leaf: Array) -> Array:
    """The numbers of a key as a key, if ``like`` is one."""
    if not _is_key(like):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))


def _joined(obs: Any) -> Array:
    """An observation as one array: float32, or uint8 for an image."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(obs)]
    if len(leaves) == 1:
        (leaf,) = leaves
        leaf = leaf if leaf.dtype == jnp.uint8 else leaf.astype(jnp.float32)
        return leaf if leaf.ndim else leaf[None]
    return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves])


def _space_of(obs: Array) -> spaces.Box:
    if obs.dtype == np.uint8:
        return spaces.Box(0, 255, obs.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def _described(state: State) -> set[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [(jax.tree_util.keystr(path) or "state", leaf) for path, leaf in leaves]
    return {f"{name}: {leaf.dtype}{list(leaf.shape)}" for name, leaf in names}


@contextmanager
def _errors_of(name: str, method: str) -> Iterator[None]:
    """Raise the errors of a user's function, or of its call, as one line."""
    try:
        yield
    except Exception as error:  # the functions of a user may raise anything
        what = f"{type(error).__name__}: {first_line(error, n_lines=2)}{place_of(error)}"
        raise ValueError(f"{name}.{method} fails: {what}") from error


def _placed(index: Array, old: Array, new: Array) -> Array:
    """``new`` in some rows of ``old``; an index beyond them is dropped."""
    return old.at[index].set(new, mode="drop")


def _chosen(done: Array, new: Array, old: Array) -> Array:
    return jnp.where(done.reshape(-1, *[1] * (new.ndim - 1)), new, old)
