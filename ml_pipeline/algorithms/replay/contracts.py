"""Records of off-policy learning: a batch from replay, and the part of it that a rank has."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ml_pipeline.policy.contracts import PolicyInput


class ReplayBatch(NamedTuple):
    """Transitions from a replay buffer, for one gradient step of an off-policy agent."""

    inputs: PolicyInput  # [B]
    action: Tensor  # [B, *act]
    reward: Tensor  # [B], discounted sum over the n steps of the window, or fewer
    next_inputs: PolicyInput  # [B], after the window; never a reset observation
    discount: Tensor  # [B], gamma**k after k steps; 0 where the episode terminated
    weight: Tensor  # [B], importance weights of prioritised replay, else 1


class BatchPart(NamedTuple):
    """The rows of a batch that one of several ranks has."""

    rows: Tensor  # [n], at least one; an array if the agent takes arrays
    size: int  # of the whole batch
    share: float  # of this rank in the batch; 0: it has no row, and its result does not count
