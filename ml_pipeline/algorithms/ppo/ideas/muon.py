"""Muon (Jordan et al., 2024) for the matrices inside the networks, AdamW for all other parameters.

    python train_ppo.py agent.optimizer._target_=ml_pipeline.algorithms.ppo.ideas.muon.Muon

Muon makes the update of a matrix orthogonal. Biases, norms, the heads and log_std are no such
matrices. Its steps are scaled to the size of Adam's, so both use ``agent.learning_rate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict

_HEADS = ("policy_head", "value_head")


class Muon:
    """Two optimisers of torch as one."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"Muon needs torch 2.9 or newer, this is {torch.__version__}")
        inner = [(n, p) for n, p in parameters if p.ndim == 2 and not n.startswith(_HEADS)]
        names = [name for name, _ in inner]
        others = [(name, each) for name, each in parameters if name not in names]
        made: list[Any] = [torch.optim.AdamW(others, lr=lr, eps=1e-5, weight_decay=weight_decay)]
        if inner:
            options: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
            made.append(torch.optim.Muon(inner, lr=lr, weight_decay=weight_decay, **options))
        self._made = made
        self.param_groups = [group for each in made for group in each.param_groups]

    def step(self) -> None:
        for each in self._made:
            each.step()

    def state_dict(self) -> StateDict:
        return {str(i): each.state_dict() for i, each in enumerate(self._made)}

    def load_state_dict(self, state: StateDict) -> None:
        for i, each in enumerate(self._made):
            each.load_state_dict(state[str(i)])
        self.param_groups = [group for each in self._made for group in each.param_groups]
