"""Random network distillation (Burda et al., 2018): a bonus for observations that are new.

    python train_ppo.py agent.on_rollout._target_=ml_pipeline.algorithms.ppo.ideas.rnd.RND

A network learns to predict the output of a random one. Where it fails, few observations were
similar. The bonus is added to the reward of the step that led there, and ends with the episode; the
paper has a second value head for a bonus that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.rollout import Rollout
from ml_pipeline.policy.auto_network import auto
from ml_pipeline.policy.contracts import Obs
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observations import Preprocess, map_obs
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.reward_scaler import RewardScaler

_CLIP_OBS = 5.0  # standard deviations


class RND:
    """Built once per run; adds its bonus to each rollout, and then learns from it."""

    def __init__(
        self,
        agent: PPOAgent,
        context: RunContext,
        coefficient: float = 0.1,
        gamma: float = 0.99,
        n_features: int = 64,
        hidden_sizes: Sequence[int] = (128, 128),
        learning_rate: float = 1e-3,
        n_minibatches: int = 4,
    ) -> None:
        """The bonus is divided by the deviation of its discounted return, as rewards may be."""
        self.coefficient = coefficient
        self._gamma = gamma
        self._learning_rate = learning_rate
        self._n_minibatches = n_minibatches
        self._device, self._world = agent.device, context.world
        self._preprocess = Preprocess(agent.reader, ignored=agent.masks.leaf, clip=_CLIP_OBS)
        self._is_single = agent.reader.is_single

        def network() -> nn.Sequential:
            trunk = auto(self._preprocess.space, hidden_sizes, "relu")
            return nn.Sequential(trunk, nn.Linear(out_features(trunk), n_features))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(context.seed, "rnd"))
            self._networks = nn.ModuleDict({"target": network(), "predictor": network()})
        self._networks["target"].requires_grad_(False)
        self._networks.to(self._device)
        self._preprocess.to(self._device)
        self._adam = FlatAdam(self._networks["predictor"], eps=1e-8, max_grad_norm=1.0)
        self._adam.world = context.world
        self._scaler: RewardScaler[Any] | None = None  # from the first rollout on
        self._scaler_state: StateDict | None = None  # of the run that is resumed
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "rnd batches"))

    def __call__(self, rollout: Rollout) -> Metrics:
        obs = self._next_obs(rollout)
        self._preprocess.learn_moments(obs, self._world)
        n_rows = rollout.reward.shape[0] * rollout.reward.shape[1]
        with torch.no_grad():
            parts = torch.arange(n_rows, device=self._device).chunk(self._n_minibatches)
            error = torch.cat([self._errors(obs, part) for part in parts])
        bonus = self._scaled(error.view(rollout.reward.shape), rollout)
        rollout.reward[:] += self.coefficient * bonus
        loss = self._learn(obs, n_rows, rollout.reward.shape[1])
        return {"rnd/bonus": float(bonus.mean()), "rnd/error": loss}

    def _next_obs(self, rollout: Rollout) -> Obs:
        """What each step led to, [T * n_envs, ...]."""
        leaves = {
            name: torch.as_tensor(leaf[1:]).to(self._device).flatten(0, 1)
            for name, leaf in rollout.obs.items()
        }
        return leaves[""] if self._is_single else leaves

    def _errors(self, obs: Obs, index: Tensor) -> Tensor:
        """How far the predictor is from the target, [B]."""
        inputs = self._preprocess(map_obs(lambda leaf: leaf[index], obs))
        wanted, found = self._networks["target"](inputs), self._networks["predictor"](inputs)
        error: Tensor = (found - wanted).square().mean(dim=-1)
        return error

    def _scaled(self, error: Tensor, rollout: Rollout) -> Any:
        """In units of the deviation of their discounted returns, where the rewards are."""
        on_host = isinstance(rollout.reward, np.ndarray)
        numbers: Any = error.cpu().numpy() if on_host else error
        if self._scaler is None:
            start: Any = np.zeros(error.shape[1]) if on_host else torch.zeros_like(error[0])
            options: dict[str, Any] = {"gamma": self._gamma, "clip": np.inf, "world": self._world}
            self._scaler = RewardScaler(start, **options)
            if self._scaler_state is not None:
                self._scaler.load_state_dict(self._scaler_state)
        return self._scaler.scaled(numbers, rollout.terminated | rollout.truncated)

    def _learn(self, obs: Obs, n_rows: int, n_envs: int) -> float:
        """One pass over the rollout; returns the mean error before each step."""
        order = torch.randperm(n_rows, generator=self._generator).to(self._device)
        self._adam.share = n_envs / self._world.all_envs(n_envs)
        losses = []
        for part in order.chunk(self._n_minibatches):
            loss = self._errors(obs, part).mean()
            self._adam.grad.zero_()
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            self._adam.step(self._learning_rate, loss.detach())
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def state_dict(self) -> StateDict:
        return {
            "networks": self._networks.state_dict(),
            "preprocess": self._preprocess.state_dict(),
            "adam": self._adam.state_dict(),
            "scaler": self._scaler_state if self._scaler is None else self._scaler.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._networks.load_state_dict(state["networks"])
        self._preprocess.load_state_dict(state["preprocess"])
        self._adam.load_state_dict(state["adam"])
        self._generator.set_state(state["generator"])
        self._scaler, self._scaler_state = None, state["scaler"]
