"""LoadedPolicy: takes observations as an env returns them, one or many, and returns actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.envs.workers.trees import read_row
from ml_pipeline.policy.contracts import ActsOnPart, Policy
from ml_pipeline.policy.masks import MaskError, flat_mask


class LoadedPolicy:
    """Chooses actions: ``action = load(RUN).predict(obs)``."""

    def __init__(
        self,
        policy: Policy,
        env_name: str,
        observation_space: AnySpace,
        action_space: AnySpace,
    ) -> None:
        self.policy = policy
        self.env_name = env_name
        if isinstance(policy, ActsOnPart):
            observation_space = policy.acting_space
        self.observation_space = observation_space
        self.action_space = action_space
        self._memory: Tensor | None = None
        self._n_envs: int | None = None  # in the episodes of _memory

    def predict(self, obs: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them.

        A Dict observation is matched by key. A batch is what a vector env returns, or a list of
        single observations. A recurrent policy remembers its episodes from call to call;
        ``reset`` starts new ones.
        """
        batch, n_envs, is_one = as_batch(self.observation_space, obs)
        mask = action_mask
        if mask is not None:
            mask = _mask_rows(mask, n_envs, self.action_space, is_one=is_one)
        if n_envs != self._n_envs:
            self._memory, self._n_envs = self.policy.new_memory(n_envs), n_envs
        try:
            actions = self.policy.act_batch(
                batch, deterministic, action_mask=mask, memory=self._memory
            )
        except MaskError as error:
            if mask is not None:
                raise ValueError(f"action_mask: {error}") from error
            raise ValueError(
                "this policy was trained with action masks; pass "
                'predict(obs, action_mask=info["action_mask"])'
            ) from error
        return read_row(actions, 0) if is_one else actions

    def reset(self) -> None:
        """Start new episodes; only a recurrent policy needs it."""
        self._n_envs = None


class Batch(NamedTuple):
    """Observations as a vector env returns them."""

    obs: Any  # arrays [n, ...], in the dicts and tuples of the space
    n: int
    is_one: bool  # a single observation was given


class _Leaf(NamedTuple):
    """One array of an observation."""

    key: str  # such as obs['camera']
    array: NDArray[Any]
    is_one: bool


def as_batch(space: AnySpace, obs: Any) -> Batch:
    """Read one observation, or several; a ``ValueError`` names the part that does not fit."""
    is_nested = isinstance(space, (spaces.Dict, spaces.Tuple))
    if is_nested and _is_list_of_observations(space, obs):
        rows = [as_batch(space, each) for each in obs]
        for index, row in enumerate(rows):
            if not row.is_one:
                raise ValueError(f"obs[{index}] is a batch; a list holds single observations")
        return Batch(_joined([row.obs for row in rows]), len(rows), False)
    is_returned = isinstance(obs, tuple) and len(obs) in (2, 5) and isinstance(obs[-1], Mapping)
    if is_returned and not is_nested:
        raise ValueError(
            f"obs is a tuple of {len(obs)}, as reset and step return it; pass its first value"
        )
    tree = _read(space, obs, "obs")
    leaves = list(_leaves(tree))
    first = leaves[0]
    for leaf in leaves[1:]:
        if leaf.is_one != first.is_one:
            one, many = (leaf, first) if leaf.is_one else (first, leaf)
            raise ValueError(
                f"{one.key} is one observation, but {many.key} is a batch of {len(many.array)}"
            )
        if len(leaf.array) != len(first.array):
            raise ValueError(
                f"{first.key} has {len(first.array)} observations, but {leaf.key} has "
                f"{len(leaf.array)}"
            )
    return Batch(_arrays(tree), len(first.array), first.is_one)


def _is_list_of_observations(space: AnySpace, obs: Any) -> bool:
    kind = Mapping if isinstance(space, spaces.Dict) else tuple
    return isinstance(obs, list) and bool(obs) and all(isinstance(each, kind) for each in obs)


def _joined(rows: list[Any]) -> Any:
    """Batches of one, as one batch."""
    first = rows[0]
    if isinstance(first, dict):
        return {name: _joined([row[name] for row in rows]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined([row[index] for row in rows]) for index in range(len(first)))
    return np.concatenate(rows)


def _read(space: AnySpace, obs: Any, key: str) -> Any:
    """A tree of leaves in the form of ``space``."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            keys = ", ".join(map(repr, space.spaces))
            raise ValueError(f"{key} is a {type(obs).__name__}; expected a dict with {keys}")
        for name in space.spaces:
            if name not in obs:
                found = ", ".join(map(repr, obs)) or "no key"
                raise ValueError(f"{key} has no key {name!r}; it has {found}")
        return {name: _read(part, obs[name], f"{key}[{name!r}]") for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(obs, (tuple, list)) or len(obs) != len(space.spaces):
            found = f"{len(obs)} parts" if isinstance(obs, (tuple, list)) else type(obs).__name__
            raise ValueError(f"{key} is {found}; expected a tuple of {len(space.spaces)} parts")
        return tuple(_read(part, obs[i], f"{key}[{i}]") for i, part in enumerate(space.spaces))
    return _read_leaf(space, obs, key)


def _read_leaf(space: AnySpace, obs: Any, key: str) -> _Leaf:
    shape = list(space.shape or ())
    wanted = f"{shape}, or [n{''.join(f', {size}' for size in shape)}] for a batch"
    if isinstance(obs, Mapping):
        raise ValueError(f"{key} is a dict; expected an array of the shape {shape}")
    if isinstance(obs, Tensor):
        obs = obs.detach().cpu()
    try:
        array = np.asarray(obs)
    except ValueError as error:
        raise ValueError(f"{key} has parts of different shapes; expected {wanted}") from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{key} holds {array.dtype}; expected numbers")
    is_one = list(array.shape) == shape
    if not is_one and (array.ndim != len(shape) + 1 or list(array.shape[1:]) != shape):
        raise ValueError(f"{key} has the shape {list(array.shape)}; expected {wanted}")
    _check_values(array, np.dtype(space.dtype), key)
    array = array.astype(space.dtype, copy=False)
    return _Leaf(key, array[np.newaxis] if is_one else array, is_one)


def _check_values(array: NDArray[Any], dtype: np.dtype[Any], key: str) -> None:
    """Refuse NaN and infinity, which runs do not learn from, and what integers cannot hold."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{key} has the value {array[~np.isfinite(array)][0]}; it must be finite")
    if dtype.kind not in "iu":
        return
    limits = np.iinfo(dtype)
    wrong = (array < limits.min) | (array > limits.max)
    if array.dtype.kind == "f":
        wrong |= array != np.trunc(array)
    if wrong.any():
        raise ValueError(
            f"{key} has the value {array[wrong][0]}; the policy reads {dtype}, integers from "
            f"{limits.min} to {limits.max}"
        )


def _leaves(tree: Any) -> Iterator[_Leaf]:
    if isinstance(tree, _Leaf):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)


def _arrays(tree: Any) -> Any:
    if isinstance(tree, _Leaf):
        return tree.array
    if isinstance(tree, dict):
        return {name: _arrays(part) for name, part in tree.items()}
    return tuple(_arrays(part) for part in tree)


def _mask_rows(given: Any, n_envs: int, space: AnySpace, *, is_one: bool) -> NDArray[np.bool_]:
    """[n_envs, n] from the mask of one env, or of a batch.

    The mask of one env may be a tuple or dict, as Gymnasium's ``sample`` takes.
    """
    if is_one and isinstance(given, (tuple, Mapping)):
        given = flat_mask(given, space)
    mask = np.asarray(given)
    if mask.dtype.kind not in "biuf" or mask.ndim not in (1, 2):
        raise ValueError(
            f"action_mask has the shape {list(mask.shape)}; expected one entry per action"
        )
    mask = mask.astype(bool)
    if is_one and mask.ndim == 1:
        mask = mask[np.newaxis]
    if mask.ndim != 2 or len(mask) != n_envs:
        rows = "[n]" if is_one else f"[{n_envs}, n]"
        raise ValueError(f"action_mask has the shape {list(mask.shape)}; expected {rows}")
    return mask
