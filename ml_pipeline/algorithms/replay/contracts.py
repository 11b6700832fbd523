"""ReplayBatch: transitions from a replay buffer, as an off-policy agent learns from them."""

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
