"""Plasticity: signs that a network loses its ability to learn, measured after each rollout.

    agent.on_rollout._target_=ml_pipeline.algorithms.ppo.ideas.plasticity.Plasticity

It changes nothing. ``dormant``: the share of units whose mean activation is below ``threshold``
times that of their layer (Sokar et al., 2023). ``rank``: how many singular values of the features
hold 99 % of their sum (Kumar et al., 2021). ``weights``: the norm of all weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.rollout import Rollout
from ml_pipeline.policy.observations import Preprocess
from ml_pipeline.records import Metrics

_ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.ELU, nn.SiLU)


class Plasticity:
    """Metrics of the actor's and the critic's network, if they are not recurrent."""

    def __init__(self, agent: PPOAgent, n_rows: int = 1024, threshold: float = 0.025) -> None:
        self._agent = agent
        self._n_rows = n_rows
        self._threshold = threshold

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Metrics:
        agent, model = self._agent, self._agent.model
        weights = {"plasticity/weights": float(agent.adam.values.norm())}
        if agent.memory_size:
            return weights
        leaves = {
            name: torch.as_tensor(leaf[:-1]).flatten(0, 1) for name, leaf in rollout.obs.items()
        }
        every = max(len(next(iter(leaves.values()))) // self._n_rows, 1)
        taken = {name: leaf[::every].to(agent.device) for name, leaf in leaves.items()}
        obs: Any = taken[""] if agent.reader.is_single else taken
        parts: list[tuple[str, nn.Module | None, Preprocess]] = [
            ("actor", model.actor, model.preprocess),
            ("critic", model.critic, model.critic_preprocess),
        ]
        found = dict(weights)
        for name, network, preprocess in parts:
            if network is not None:
                dormant, rank = self._measured(network, preprocess(obs))
                found |= {f"plasticity/{name}_dormant": dormant, f"plasticity/{name}_rank": rank}
        return found

    def _measured(self, network: nn.Module, obs: Any) -> tuple[float, float]:
        """The share of dormant units in all layers, and the rank of the features."""
        layers: list[Tensor] = []
        # Only for this pass: a fast backend steps aside for a network with hooks.
        hooks = [
            each.register_forward_hook(lambda module, inputs, output: layers.append(output))
            for each in network.modules()
            if isinstance(each, _ACTIVATIONS)
        ]
        try:
            features = network(obs)
        finally:
            for hook in hooks:
                hook.remove()
        dormant = []
        for layer in layers:
            size = layer.abs().flatten(1).mean(dim=0)
            dormant.append(size <= self._threshold * size.mean())
        share = float(torch.cat(dormant).float().mean()) if dormant else 0.0
        values = torch.linalg.svdvals(features.float())
        held = values.cumsum(0) / values.sum().clamp(min=1e-12)
        return share, float((held < 0.99).sum() + 1)
