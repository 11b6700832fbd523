"""What an iteration of PPO reports: metrics of its gradient steps, and the quality of its rollout.

Each gradient step leaves one row of a table, from which metrics and errors are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import COLUMNS
from ml_pipeline.moments import merge_moments
from ml_pipeline.policy.optimiser import Optimiser
from ml_pipeline.records import Metrics
from ml_pipeline.training.checks import NonFiniteError, TrainingError
from ml_pipeline.training.returns import explained_variance

_METRIC_NAMES = {
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "clip_fraction": "policy/clip_fraction",
    "grad_norm": "loss/grad_norm",
}
UPDATE_METRICS = (*_METRIC_NAMES.values(), "loss/skipped_updates")
Moments = tuple[float, float, int]  # mean, variance and count
N_MEANS = COLUMNS.index("grad_norm")  # the columns before it: means over a minibatch


class RolloutQuality(NamedTuple):
    """How well the critic fits a finished rollout, and whether the values of the envs are valid."""

    explained_variance: float
    is_finite: bool  # all observations and rewards
    has_choices: bool  # every action mask allows an action


def update_means(table: NDArray[np.generic], extra: Sequence[str] = ()) -> Metrics:
    """Means over the gradient steps that were not skipped; ``table`` has one row per step.

    ``extra``: names of the metrics that the loss adds.
    """
    values, finite = table[:, :-1], table[:, -1] != 0
    n_skipped = int((~finite).sum())
    means = np.where(finite[:, None], values, 0.0).sum(axis=0) / max(len(finite) - n_skipped, 1)
    names = [*extra, *(_METRIC_NAMES[column] for column in COLUMNS[:-1])]
    metrics = dict(zip(names, means.tolist(), strict=True))
    return {**metrics, "loss/skipped_updates": float(n_skipped)} if n_skipped else metrics


def rollout_error() -> TrainingError:
    """For tensor envs, whose values are checked once per rollout."""
    return TrainingError(
        "an env returned an observation or a reward that is not finite. To find it, train a "
        "few envs with compile=off and print what the env's advance returns"
    )


def mask_error() -> TrainingError:
    """For tensor envs, whose masks are checked once per rollout."""
    return TrainingError(
        "an action mask of an env allowed no action. To find it, train a few envs with compile=off "
        "and print what the env's action_mask returns"
    )


def update_error(
    table: NDArray[np.generic], config: PPOConfig, adam: Optimiser | None
) -> TrainingError:
    """Names the first gradient step in ``table`` that was not finite.

    ``adam`` still has the gradients of that step; None if later steps replaced them.
    """
    broken = None if adam is None else adam.broken_gradients()
    row = int((table[:, -1] != 0).argmin())
    own = table[:, -len(COLUMNS) :]  # without those that a loss adds
    fields = zip(COLUMNS[:-1], own[row, :-1].tolist(), strict=True)
    names = [name for name, value in fields if not math.isfinite(value)]
    if broken:
        names.append(f"the gradients of {', '.join(broken[:3])}{', ...' * (len(broken) > 3)}")
    left = "That step changed nothing" if broken is None else "The weights did not change"
    epoch, minibatch = 1 + row // config.n_minibatches, row % config.n_minibatches + 1
    target = str(config.loss["_target_"])  # a user's own loss is the first suspect
    is_ours = target.startswith("ml_pipeline.")
    suspect = "" if is_ours else f"Look at agent.loss._target_={target} first. "
    return NonFiniteError(
        f"epoch {epoch}, minibatch {minibatch}: {' and '.join(names)} not finite. {left}. "
        f"{suspect}Try a smaller agent.learning_rate, and look for huge observations or "
        "rewards (agent.normalize_obs, agent.scale_reward)"
    )


def device_quality(
    value: Tensor, target: Tensor, reward: Tensor, obs: Sequence[Tensor], has_choice: Tensor
) -> Tensor:
    """The fields of ``RolloutQuality``, on the device; ``has_choice``: of every action mask."""
    is_finite = torch.isfinite(reward).all()
    for leaf in obs:
        is_finite = is_finite & torch.isfinite(leaf).all()
    flags = is_finite.float(), has_choice.all().float()
    return torch.stack([explained_variance(value, target), *flags])


class QualityPart(NamedTuple):
    """What ``merged_quality`` needs of each rank."""

    is_finite: bool
    has_choices: bool
    error: Moments  # of the critic
    target: Moments


def quality_part(value: Tensor, target: Tensor, own: RolloutQuality) -> QualityPart:
    target = target.double()
    both = (target - value.double(), target)
    moments = ((float(x.mean()), float(x.var(correction=0)), x.numel()) for x in both)
    return QualityPart(own.is_finite, own.has_choices, *moments)


def merged_quality(parts: Sequence[QualityPart]) -> RolloutQuality:
    """The quality of the rollouts of several ranks together."""
    _, unexplained, _ = reduce(_merged, [part.error for part in parts])
    _, variance, _ = reduce(_merged, [part.target for part in parts])
    explained = 1.0 - unexplained / variance if variance > 0 else 0.0
    return RolloutQuality(
        explained,
        is_finite=all(part.is_finite for part in parts),
        has_choices=all(part.has_choices for part in parts),
    )


def _merged(one: Moments, other: Moments) -> Moments:
    return merge_moments(*one, *other)
