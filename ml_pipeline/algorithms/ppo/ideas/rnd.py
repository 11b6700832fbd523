"""Random network distillation (Burda et al., 2018): a bonus for observations that are new.

    python train_ppo.py agent.on_rollout._target_=ml_pipeline.algorithms.ppo.ideas.rnd.RND

A network learns to predict the output of a random one. Where it fails, few observations were
similar. Bonuses do not end with an episode, so they have a critic of their own. PPO learns from the
advantages of its rewards plus ``coefficient`` times those of the bonuses.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from ml_pipeline.training.returns import gae
from ml_pipeline.training.reward_scaler import RewardScaler

_CLIP_OBS = 5.0  # standard deviations


class RND:
    """Built once per run; adds its bonuses to each rollout, and then learns from it."""

    def __init__(
        self,
        agent: PPOAgent,
        context: RunContext,
        coefficient: float = 1.0,
        gamma: float = 0.99,
        n_features: int = 64,
        hidden_sizes: Sequence[int] = (128, 128),
        learning_rate: float = 1e-4,
        n_minibatches: int = 4,
    ) -> None:
        """Bonuses are divided by the deviation of their discounted sum, as rewards may be.

        ``learning_rate``, ``n_minibatches``: of the predictor, in one pass over each rollout. If it
        learns faster, all bonuses vanish before the policy has followed them.
        """
        self.coefficient = coefficient
        self._gamma = gamma
        self._learning_rate = learning_rate
        self._n_minibatches = n_minibatches
        self._config, self._device, self._world = agent.config, agent.device, context.world
        self._preprocess = Preprocess(agent.reader, ignored=agent.masks.leaf, clip=_CLIP_OBS)

        def network(n_outputs: int) -> nn.Sequential:
            trunk = auto(self._preprocess.space, hidden_sizes, "relu")
            return nn.Sequential(trunk, nn.Linear(out_features(trunk), n_outputs))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(context.seed, "rnd"))
            sizes = {"target": n_features, "predictor": n_features, "critic": 1}
            networks = nn.ModuleDict({name: network(n) for name, n in sizes.items()})
        networks["target"].requires_grad_(False)
        networks["preprocess"] = self._preprocess
        self._networks = networks.to(self._device)
        self._adams = {
            name: FlatAdam(self._networks[name], eps=1e-8, max_grad_norm=1.0)
            for name in ("predictor", "critic")
        }
        self._scaler: RewardScaler[Tensor] | None = None  # from the first rollout on
        self._scaler_state: StateDict | None = None  # of the run that is resumed
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "rnd batches"))

    def __call__(self, rollout: Rollout) -> Metrics:
        config, (n_steps, n_envs) = self._config, rollout.reward.shape
        obs = self._observations(rollout)
        self._preprocess.learn_moments(obs, self._world)
        with torch.no_grad():
            parts = torch.arange((n_steps + 1) * n_envs, device=self._device).chunk(8)
            error = torch.cat([self._errors(obs, part) for part in parts]).view(-1, n_envs)
            value = torch.cat([self._outputs("critic", obs, part) for part in parts])
        bonus, value = self._scaled(error[1:]), value.view(-1, n_envs)
        every, lam = torch.ones_like(bonus), config.gae_lambda
        advantage = gae(bonus, value[:-1], value[1:], every, gamma=self._gamma, lam=lam)
        ended = torch.as_tensor(rollout.terminated | rollout.truncated).to(self._device)
        # The rewards that raise what ``gae`` makes of the rollout by ``advantage``.
        reward = self.coefficient * advantage
        reward[:-1] -= config.gamma * lam * ~ended[:-1] * reward[1:]
        is_array = isinstance(rollout.reward, np.ndarray)
        rollout.reward[:] += reward.cpu().numpy() if is_array else reward
        for adam in self._adams.values():
            adam.world, adam.share = self._world, n_envs / self._world.all_envs(n_envs)
        self._learn(obs, (advantage + value[:-1]).flatten(), n_envs)
        return {"rnd/bonus": float(bonus.mean()), "rnd/error": float(error[1:].mean())}

    def _observations(self, rollout: Rollout) -> Obs:
        """[(T + 1) * n_envs, ...]; after the end of an episode comes the first of the next."""
        tensors = {
            name: torch.as_tensor(leaf).to(self._device) for name, leaf in rollout.obs.items()
        }
        leaves = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
        return leaves.get("", leaves)

    def _outputs(self, name: str, obs: Obs, index: Tensor) -> Tensor:
        outputs: Tensor = self._networks[name](self._preprocess(map_obs(lambda x: x[index], obs)))
        return outputs

    def _errors(self, obs: Obs, index: Tensor) -> Tensor:
        """How far the predictor is from the target, [B]."""
        wanted, found = (self._outputs(each, obs, index) for each in ("target", "predictor"))
        return (found - wanted).square().mean(dim=-1)

    def _scaled(self, error: Tensor) -> Tensor:
        if self._scaler is None:
            start = torch.zeros_like(error[0])
            self._scaler = RewardScaler(start, gamma=self._gamma, clip=np.inf, world=self._world)
            if self._scaler_state is not None:
                self._scaler.load_state_dict(self._scaler_state)
        return self._scaler.scaled(error, torch.zeros_like(error, dtype=torch.bool))

    def _learn(self, obs: Obs, value_target: Tensor, n_envs: int) -> None:
        """The critic learns as often as PPO's, the predictor in one pass."""
        for _ in range(self._config.n_epochs):
            for part in self._minibatches(value_target, self._config.n_minibatches):
                error = self._outputs("critic", obs, part).squeeze(-1) - value_target[part]
                self._step("critic", 0.5 * error.square().mean(), self._config.learning_rate)
        for part in self._minibatches(value_target, self._n_minibatches):
            reached = part + n_envs  # one row later
            self._step("predictor", self._errors(obs, reached).mean(), self._learning_rate)

    def _minibatches(self, rows: Tensor, n: int) -> Sequence[Tensor]:
        return torch.randperm(len(rows), generator=self._generator).to(self._device).chunk(n)

    def _step(self, name: str, loss: Tensor, learning_rate: float) -> None:
        self._adams[name].grad.zero_()
        torch.autograd.backward(loss)
        self._adams[name].step(learning_rate, loss.detach())

    def state_dict(self) -> StateDict:
        return {
            "networks": self._networks.state_dict(),
            "adams": {name: adam.state_dict() for name, adam in self._adams.items()},
            "scaler": self._scaler_state if self._scaler is None else self._scaler.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._networks.load_state_dict(state["networks"])
        for name, adam in self._adams.items():
            adam.load_state_dict(state["adams"][name])
        self._generator.set_state(state["generator"])
        self._scaler, self._scaler_state = None, state["scaler"]
