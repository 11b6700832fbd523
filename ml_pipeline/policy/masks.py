"""ActionMasks: which actions an env allows, read from its infos or from a Dict observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.errors import UserError
from ml_pipeline.policy.distributions import ActionSpaceError, Distribution
from ml_pipeline.policy.observations import ObservationReader

_KEY = "action_mask"  # in infos and in Dict observations

Mask = NDArray[np.bool_]


class MaskError(UserError):
    """An action mask is missing, has the wrong size, or allows no action."""


class ActionMasks:
    """Finds and checks the masks of an env; ``source`` is the config key agent.action_mask."""

    def __init__(self, source: str, reader: ObservationReader, distribution: Distribution) -> None:
        self.leaf = find_mask_leaf(source, reader)  # of the observation, or None
        self.in_infos = source == "info"
        self.are_used = self.leaf is not None or self.in_infos
        self._distribution = distribution
        if self.are_used and not distribution.mask_size:
            raise ActionSpaceError(
                f"agent.action_mask={source}: actions of {distribution.space} cannot be masked; "
                "set agent.action_mask=none"
            )
        if self.leaf is not None and reader.shapes[self.leaf] != (distribution.mask_size,):
            raise MaskError(
                f"the action mask {self.leaf!r} of the observation has shape "
                f"{reader.shapes[self.leaf]}; the action space needs ({distribution.mask_size},)"
            )

    def in_step(self, leaves: dict[str, NDArray[Any]], infos: Mapping[str, Any]) -> Mask | None:
        """The checked masks of one step of all envs, [n_envs, n]; None without masks."""
        if not self.are_used:
            return None
        if self.leaf is not None:
            return self.checked(leaves[self.leaf] != 0)
        mask = masks_in(infos, self._distribution.space)
        if mask is None:
            raise MaskError(
                "agent.action_mask=info: the infos hold no action_mask; the env must return one "
                "from every reset and step, and vec_env.infos must be all"
            )
        return self.checked(mask)

    def on_device(self, leaves: Mapping[str, Tensor], given: Tensor | None) -> Tensor | None:
        """The masks of tensor envs, [n_envs, n] bool, not checked; ``given``: those of the infos.

        ``leaves`` are the observations.
        """
        if self.leaf is not None:
            return leaves[self.leaf] != 0
        if not self.in_infos:
            return None
        if given is None:
            raise MaskError("agent.action_mask=info: the infos of the env hold no action_mask")
        return given.bool()

    def in_call(self, leaves: dict[str, NDArray[Any]], given: Mask | None) -> Mask | None:
        """The checked masks for a call of ``act_batch``; ``given`` is its argument."""
        if self.leaf is None and given is not None:
            return self.checked(given)
        if self.in_infos:
            raise MaskError("this policy needs masks; pass action_mask=agent.mask_of(infos)")
        return self.in_step(leaves, {})

    def of_final(
        self, leaves: dict[str, NDArray[Any]], infos: Mapping[str, Any], env: int
    ) -> Mask | None:
        """The mask of one env's final observation, or None if it has none."""
        if self.leaf is not None:
            final: Mask = leaves[self.leaf] != 0
            return final
        given = infos.get("final_info", {}).get(_KEY) if self.in_infos else None
        return None if given is None else flat_mask(_row(given, env), self._distribution.space)

    def of_infos(self, infos: Mapping[str, Any]) -> Mask | None:
        """The masks in a vector env's infos, or None if they are not read from there."""
        return masks_in(infos, self._distribution.space) if self.in_infos else None

    def checked(self, mask: Mask) -> Mask:
        return checked_mask(mask, self._distribution)


def find_mask_leaf(source: str, reader: ObservationReader) -> str | None:
    """The leaf of the observation that ``agent.action_mask=source`` means, or None."""
    if source == "auto":
        return _KEY if _KEY in reader.leaves else None
    if source in ("none", "info"):
        return None
    if any(leaf.startswith(f"{source}/") for leaf in reader.leaves):
        raise MaskError(
            f"agent.action_mask={source}: a mask in the observation must be one array for all "
            "parts of the action; join them, or put the mask into the info"
        )
    if source not in reader.leaves or reader.is_single:
        keys = "none, it is not a Dict" if reader.is_single else ", ".join(reader.leaves)
        raise MaskError(
            f"agent.action_mask={source}: the observation has no such key; its keys: {keys}"
        )
    return source


def masks_in(infos: Mapping[str, Any], space: gym.Space[Any]) -> Mask | None:
    """The action masks in a vector env's infos, [n_envs, n], or None if there are none.

    ``space``: of one action.
    """
    if _KEY not in infos:
        return None
    missing = np.flatnonzero(~np.asarray(infos.get(f"_{_KEY}", True)))
    if len(missing):
        raise MaskError(f"env {missing[0]} returned no action_mask in its info in this step")
    return _rows(infos[_KEY], space)


def _rows(given: Any, space: gym.Space[Any]) -> Mask:
    """The masks of several envs, [n_envs, n]."""
    if isinstance(given, Mapping) and isinstance(space, spaces.Dict):
        # Gymnasium joins the dicts of all envs to one dict.
        parts = [_rows(given[name], part) for name, part in space.items() if name in given]
        return np.concatenate(parts, axis=1)
    if not isinstance(given, np.ndarray) or given.dtype == object:
        return np.stack([flat_mask(row, space) for row in given])
    return np.asarray(given, dtype=bool)


def flat_mask(mask: Any, space: gym.Space[Any]) -> Mask:
    """The mask of one action, [n]: an array, or in the form that Gymnasium's ``sample`` takes.

    That is one array per choice of a MultiDiscrete space, and a mask for each part of a Tuple or
    Dict. A part that is not discrete has None, and may be left out of a dict.
    """
    if mask is None:
        return np.ones(0, dtype=bool)
    if isinstance(mask, np.ndarray) and mask.dtype != object:
        return np.asarray(mask, dtype=bool)
    if isinstance(mask, Mapping):
        if not isinstance(space, spaces.Dict):
            raise MaskError(f"an action mask for {space} must be an array, got {mask}")
        parts = [flat_mask(mask.get(name), part) for name, part in space.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [flat_mask(each, part) for each, part in zip(mask, space, strict=False)]
    else:
        parts = [np.ravel(part) for part in mask]
    return np.concatenate(parts).astype(bool)


def _row(given: Any, env: int) -> Any:
    """The mask of one env."""
    if isinstance(given, Mapping):
        return {name: _row(part, env) for name, part in given.items()}
    return given[env]


def checked_mask(mask: Mask, distribution: Distribution) -> Mask:
    """The mask, if it has the right size and allows every env an action."""
    size = distribution.mask_size
    if not size:
        raise MaskError("the actions of this env take no mask; leave it out")
    if mask.shape != (len(mask), size):
        raise MaskError(f"an action mask must have {size} entries, got shape {mask.shape[1:]}")
    stuck = np.flatnonzero(~distribution.leaves_a_choice(mask))
    if len(stuck):
        raise MaskError(f"the action mask of env {stuck[0]} allows no action: {mask[stuck[0]]}")
    return mask
