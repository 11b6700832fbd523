"""write_all: stores the actions of all envs, and refuses those that are not in their space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.envs.workers.trees import Tree, check_cast


class Choices(NamedTuple):
    """The range of integers of one leaf of a space, both ends included."""

    low: Any  # int, or an array for a MultiDiscrete space
    high: Any
    space: AnySpace  # for the error


def choices_of(space: AnySpace) -> Tree:
    """A tree for ``write_all``: ``Choices`` for each discrete leaf, None for others."""
    if isinstance(space, spaces.Dict):
        return {name: choices_of(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [choices_of(part) for part in space.spaces]
    if isinstance(space, spaces.Discrete):
        return Choices(int(space.start), int(space.start + space.n) - 1, space)
    if isinstance(space, spaces.MultiDiscrete):
        return Choices(space.start, space.start + space.nvec - 1, space)
    return Choices(0, 1, space) if isinstance(space, spaces.MultiBinary) else None


def write_all(tree: Tree, values: Any, choices: Tree) -> bool:
    """Store a batch of actions; a wrong shape, type or choice is an error.

    Returns whether the envs can read their actions from the tree. If not, they must be given the
    actions themselves: objects, lists, or arrays whose dtype the space cannot represent exactly.
    """
    if type(tree) is np.ndarray:
        array = values if type(values) is np.ndarray else np.asarray(values)
        if array.ndim == 0:
            raise TypeError(f"actions must have shape {tree.shape}, got the single action {values}")
        if array.shape != tree.shape:
            raise ValueError(f"actions must have shape {tree.shape}, got {array.shape}")
        if choices is not None:
            _check_choices(array, choices)
        is_exact = array.dtype == tree.dtype
        if not is_exact:
            check_cast(array, tree.dtype, "actions")
            is_exact = np.can_cast(array.dtype, tree.dtype)
        tree[...] = array
        return is_exact and not isinstance(values, (list, tuple))
    if isinstance(tree, dict):
        stored = [write_all(tree[name], values[name], choices[name]) for name in tree]
        return all(stored)
    if isinstance(tree, tuple):
        stored = [write_all(*parts) for parts in zip(tree, values, choices, strict=True)]
        return all(stored)
    values = list(values)
    if len(values) != len(tree):
        raise ValueError(f"expected actions for {len(tree)} envs, got {len(values)}")
    return False


def _check_choices(actions: NDArray[Any], choices: Choices) -> None:
    """Refuse actions outside the space: many envs do not check them."""
    low, high, space = choices
    if actions.dtype.kind not in "iub":
        raise TypeError(f"actions in {space} must be integers, got dtype {actions.dtype}")
    if actions.ndim == 1:
        numbers = actions.tolist()  # faster than NumPy for a few numbers
        if low <= min(numbers) and max(numbers) <= high:
            return
    wrong = (actions < low) | (actions > high)
    if wrong.any():
        env = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"action {actions[env]} of env {env} is not in {space}")


def scalars_of(tree: Tree, rows: Sequence[int]) -> NDArray[Any] | None:
    """The rows as one view if each is a single number and they are adjacent, else None."""
    if not isinstance(tree, np.ndarray) or tree.ndim > 1 or not rows:
        return None
    view = tree[rows[0] : rows[-1] + 1]
    return view if len(view) == len(rows) else None
