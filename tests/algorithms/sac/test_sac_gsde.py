"""gSDE for SAC: variance and log-prob by hand, noise that is held, and export of the mean."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer
from ml_pipeline.algorithms.sac.agent import SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.sac.soft_actions import SquashedNoise
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import Envs, RunContext

CPU = torch.device("cpu")
ACTIONS = spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 10.0]))
OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)


class StillEnv(gym.Env[Any, Any]):
    """Always returns the same observation, so actions change only with the noise."""

    observation_space = OBSERVATIONS
    action_space = ACTIONS

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(3, 0.5, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(3, 0.5, np.float32), 0.0, False, False, {}


def place() -> RunContext:
    return RunContext.alone(seed=1)


def made(**settings: Any) -> SACAgent:
    env_spaces: Any = Spaces(OBSERVATIONS, ACTIONS)
    return SACAgent(env_spaces, MLP, SACConfig(box_policy="gsde", **settings), place())


def noise_of(*log_stds: list[float]) -> SquashedNoise:
    """Two actions and ``len(log_stds)`` features."""
    policy = SquashedNoise(ACTIONS, len(log_stds), log_std_init=0.0, every_steps=4)
    with torch.no_grad():
        policy.unsquashed.log_std.copy_(torch.tensor(log_stds))
    return policy


def test_variance_by_hand() -> None:
    policy = noise_of([0.0, math.log(2.0)], [math.log(3.0), 0.0])
    outputs = torch.tensor([[0.1, 0.2, 2.0, -1.0]])  # two means, two features

    mean, log_std = policy.split(outputs)

    assert mean[0].tolist() == pytest.approx([0.1, 0.2])
    # sum over features of (feature * std)^2
    expected = [2.0**2 * 1.0 + 1.0 * 9.0, 2.0**2 * 4.0 + 1.0 * 1.0]
    assert (2 * log_std).exp()[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_actions_of_rollouts_have_the_variance_that_updates_use() -> None:
    policy = noise_of([-1.0, -0.5], [-0.3, -2.0])
    outputs = torch.tensor([0.1, 0.2, 0.5, -0.4])
    noise = policy.draw_noise(1, 50_000, torch.Generator().manual_seed(0))[0]

    action = policy.sample(outputs.expand(50_000, -1), noise)
    raw = torch.atanh(action)

    mean, log_std = policy.split(outputs)
    torch.testing.assert_close(raw.mean(dim=0), mean, atol=0.01, rtol=0)
    torch.testing.assert_close(raw.std(dim=0), log_std.exp(), atol=0, rtol=0.02)


def test_log_prob_equals_torchs() -> None:
    policy = noise_of([-1.0, -0.5], [-0.3, -2.0], [0.2, -0.7])
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(9, 5, generator=generator) * 0.7
    noise = torch.randn(9, 2, generator=generator)
    mean, log_std = policy.split(outputs)
    squash = torch.distributions.TanhTransform(cache_size=1)
    to_env = torch.distributions.AffineTransform(torch.tensor([0.0, 5.0]), torch.tensor([2.0, 5.0]))
    normal = torch.distributions.Normal(mean, log_std.exp())
    peer = torch.distributions.TransformedDistribution(normal, squash)

    action, log_prob = policy.sample_and_log_prob(outputs, noise)

    squashed = squash(mean + log_std.exp() * noise)
    env_action = to_env(squashed)
    torch.testing.assert_close(torch.from_numpy(policy.to_env(action.detach().numpy())), env_action)
    torch.testing.assert_close(log_prob, peer.log_prob(squashed).sum(-1), rtol=1e-4, atol=1e-4)


def test_an_update_trains_the_noise_and_the_features() -> None:
    agent = made()
    obs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    inputs = PolicyInput(obs, None, None, None)
    rest = inputs, torch.full((16,), 0.9), torch.ones(16)
    before = agent.actor.distribution.unsquashed.log_std.clone()

    _, log_prob = agent.distribution.sample_and_log_prob(
        agent.actor(agent.preprocess(obs), None), torch.zeros(16, 2)
    )
    (reached,) = torch.autograd.grad(log_prob.sum(), agent.actor.trunk.layers[0].weight)
    agent.update(
        ReplayBatch(inputs, torch.zeros(16, 2), torch.ones(16), *rest), agent.rates(0.0, 1e-3)
    )

    assert reached.abs().sum() > 0
    assert not torch.equal(agent.actor.distribution.unsquashed.log_std, before)


def test_act_batch_holds_its_noise_also_after_loading() -> None:
    agent, other = made(gsde_every_steps=3), made(gsde_every_steps=3)
    obs = np.full((2, 3), 0.5, np.float32)

    first = [agent.act_batch(obs) for _ in range(2)]
    other.load_state_dict(agent.state_dict())
    rest = [agent.act_batch(obs) for _ in range(5)]
    actions = np.stack([*first, *rest])

    assert np.array_equal(np.stack([other.act_batch(obs) for _ in range(5)]), np.stack(rest))
    changes = [bool((a != b).any()) for a, b in pairwise(actions)]
    assert changes == [False, False, True, False, False, True]
    assert (actions[0, 0] != actions[0, 1]).any()  # each env has its own noise


@pytest.mark.parametrize(("learning_starts", "every"), [(0, 3), (10_000, 3), (0, 0)])
def test_training_holds_its_noise(learning_starts: int, every: int) -> None:
    settings: Any = {"iteration_length": 6, "updates_per_env_step": 0.0, "buffer_size": 100}
    settings["batch_size"] = 8
    agent = made(gsde_every_steps=every, learning_starts=learning_starts, **settings)
    env = SerialEnv([StillEnv] * 2, seed=1)
    trainer = OffPolicyTrainer(agent, Envs([env], 1, False), agent.config, place())

    for _ in range(2):
        trainer.train_episode_vectorized()
    env.close()

    actions = trainer.replay.tables["action"].view(-1, 2, 2)[:12]
    changes = [bool((a != b).any()) for a, b in pairwise(actions)]
    length = every or 6
    assert changes == [(t + 1) % length == 0 for t in range(11)]
    assert (actions[0, 0] != actions[0, 1]).all()


def test_export_gives_the_deterministic_action() -> None:
    agent = made(log_std_init=0.5)
    obs = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)

    exported = agent.greedy()({"obs": torch.from_numpy(obs)})["action"]

    np.testing.assert_allclose(exported.numpy(), agent.act_batch(obs, True), rtol=1e-6)
