"""PPOAgent: its update against a textbook PPO, and what acting may and may not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import ObservationSpaceError, PPOAgent
from ml_pipeline.config import PPOConfig
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Minibatch

OBS = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


def agent_for(action_space: spaces.Space[Any], seed: int = 1, **options: Any) -> PPOAgent:
    network = partial(MLP, hidden_sizes=(8,))
    config = PPOConfig(**options)
    return PPOAgent(OBS, action_space, network, config, device=torch.device("cpu"), seed=seed)


def minibatch(agent: PPOAgent, size: int = 32) -> Minibatch:
    generator = torch.Generator().manual_seed(3)
    obs = torch.randn(size, 3, generator=generator)
    noise = agent.draw_noise(1, size, generator)[0]
    sample = agent.sample_batch(obs, noise)
    # An older policy: ratios then lie on both sides of the clip range.
    log_prob = sample.log_prob + 0.4 * torch.randn(size, generator=generator)
    advantage, target = (torch.randn(size, generator=generator) for _ in range(2))
    return Minibatch(obs, sample.action, log_prob, advantage, target)


@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_one_update_equals_a_textbook_ppo(action_space: spaces.Space[Any]) -> None:
    options = {"learning_rate": 1e-2, "entropy_coef": 0.01, "max_grad_norm": 0.3}
    agent, textbook = agent_for(action_space, **options), agent_for(action_space, **options)
    batch = minibatch(agent)

    metrics = agent.update(batch)
    loss = textbook_step(textbook, batch)

    for ours, theirs in zip(agent.model.parameters(), textbook.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    told = metrics["loss/policy"] + 0.5 * metrics["loss/value"] - 0.01 * metrics["policy/entropy"]
    torch.testing.assert_close(told, loss)
    assert 0.1 < metrics["policy/clip_fraction"] < 0.9


def textbook_step(agent: PPOAgent, batch: Minibatch) -> Tensor:
    """The formulas of the paper, with torch's distributions and a plain Adam."""
    model = agent.model
    outputs = model.policy_head(model.actor(batch.obs))
    if hasattr(model.distribution, "log_std"):
        normal = torch.distributions.Normal(outputs, model.distribution.log_std.exp())
        policy: Any = torch.distributions.Independent(normal, 1)
    else:
        policy = torch.distributions.Categorical(logits=outputs)
    ratio = torch.exp(policy.log_prob(batch.action) - batch.log_prob)
    advantage = batch.advantage - batch.advantage.mean()
    advantage = advantage / (batch.advantage.std(correction=0) + 1e-8)
    surrogate = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    value = model.value_head(model.critic(batch.obs)).squeeze(1)
    value_loss = nn.functional.mse_loss(value, batch.value_target) / 2
    loss = -surrogate.mean() + 0.5 * value_loss - 0.01 * policy.entropy().mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss.detach()


def test_the_seed_decides_the_weights_and_the_global_generator_does_not() -> None:
    def weights(agent: PPOAgent) -> list[Any]:
        return [parameter.tolist() for parameter in agent.model.parameters()]

    torch.manual_seed(1)
    first = weights(agent_for(DISCRETE, seed=5))
    torch.manual_seed(2)

    assert weights(agent_for(DISCRETE, seed=5)) == first
    assert weights(agent_for(DISCRETE, seed=6)) != first


def test_act_batch_gives_actions_of_the_space() -> None:
    obs = np.random.default_rng(1).normal(size=(64, 3))
    for space in (DISCRETE, BOX):
        agent = agent_for(space)
        for deterministic in (True, False):
            actions = agent.act_batch(obs, deterministic)
            assert len(actions) == 64
            assert all(space.contains(action) for action in actions)


def test_deterministic_actions_repeat_and_sampled_ones_differ() -> None:
    agent = agent_for(BOX)
    obs = np.zeros((5, 3), dtype=np.float32)

    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()
    assert agent.act_batch(obs).tolist() != agent.act_batch(obs).tolist()


def test_the_split_of_a_batch_changes_no_draw() -> None:
    agent = agent_for(DISCRETE)
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    noise = agent.draw_noise(1, 8, torch.Generator().manual_seed(2))[0]

    whole = agent.sample_batch(obs, noise).action.tolist()
    halves = [agent.sample_batch(obs[half], noise[half]) for half in (slice(4), slice(4, 8))]

    assert [a for half in halves for a in half.action.tolist()] == whole


def test_a_loaded_agent_goes_on_as_the_saved_one() -> None:
    saved, loaded = agent_for(DISCRETE, seed=1), agent_for(DISCRETE, seed=2)
    batch = minibatch(saved)
    saved.update(batch)
    loaded.load_state_dict(saved.state_dict())

    for agent in (saved, loaded):
        agent.update(batch)

    obs = np.ones((50, 3), dtype=np.float32)
    assert saved.act_batch(obs).tolist() == loaded.act_batch(obs).tolist()
    for ours, theirs in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_minibatch_of_one_stays_finite() -> None:
    agent = agent_for(DISCRETE)

    metrics = agent.update(minibatch(agent, size=1))

    assert all(torch.isfinite(value) for value in metrics.values())


def test_an_observation_space_that_ppo_cannot_read_is_named() -> None:
    space = spaces.Dict({"a": OBS})

    with pytest.raises(ObservationSpaceError, match=r"this env has Dict"):
        PPOAgent(space, DISCRETE, MLP, PPOConfig(), device=torch.device("cpu"), seed=1)


def test_a_network_without_out_features_is_told_what_is_missing() -> None:
    with pytest.raises(UserError, match="network Flatten has no out_features"):
        PPOAgent(
            OBS, DISCRETE, lambda _: nn.Flatten(), PPOConfig(), device=torch.device("cpu"), seed=1
        )
