"""ObservationInput: how an agent reads the observations and action masks of its envs."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.masks import ActionMasks, Mask, find_mask_leaf
from ml_pipeline.policy.observations import ObservationReader, Preprocess


class InputSettings(Protocol):
    """The settings that ``ObservationInput`` reads."""

    action_mask: str
    normalize_obs: bool
    clip_obs: float


class ObservationInput:
    """Reads observations into tensors on ``device``, and prepares them for a network."""

    def __init__(
        self, space: gym.Space[Any], settings: InputSettings, device: torch.device
    ) -> None:
        self.reader = ObservationReader(space)
        self.inputs = partial(policy_input, self.reader, device)
        self._mask_source = settings.action_mask
        leaf = find_mask_leaf(settings.action_mask, self.reader)
        clip = settings.clip_obs if settings.normalize_obs else None
        self.preprocess = Preprocess(self.reader, ignored=leaf, clip=clip).to(device)

    def masks(self, distribution: Distribution) -> ActionMasks:
        """The action masks of the env, for actions of ``distribution``."""
        return ActionMasks(self._mask_source, self.reader, distribution)


def policy_input(
    reader: ObservationReader,
    device: torch.device,
    leaves: dict[str, NDArray[Any]],
    action_mask: Mask | None = None,
    memory: Tensor | None = None,
    episode_start: Tensor | None = None,
) -> PolicyInput:
    """Arrays as ``reader`` returns them, moved to the device."""
    obs = reader.to_tensors(leaves, device)
    mask = None if action_mask is None else torch.from_numpy(action_mask).to(device)
    return PolicyInput(obs, mask, memory, episode_start)


def array_input(
    reader: ObservationReader, leaves: dict[str, Any], action_mask: Any = None
) -> PolicyInput:
    """The same as arrays, for an agent that takes them; such an agent is not recurrent."""
    return PolicyInput(leaves[""] if reader.is_single else leaves, action_mask, None, None)
