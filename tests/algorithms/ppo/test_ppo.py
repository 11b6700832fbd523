"""PPOAgent: its first weights, its actions, and the networks it learns with.

tests/contracts/test_backends.py tests its arithmetic, tests/policy/test_masks.py its masks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_agents import agent_for, minibatch
from torch import nn

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.errors import UserError
from ml_pipeline.policy.image_networks import DictNetwork
from ml_pipeline.policy.networks import MLP

OBS = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)


def agent_with(action_space: Any, obs_space: Any = OBS, **more: Any) -> PPOAgent:
    return agent_for(obs_space, action_space, **more)


def test_a_shared_trunk_learns_from_both_losses() -> None:
    agent = agent_with(DISCRETE, shared_trunk=True)
    batch = minibatch(agent)

    agent.update(batch._replace(advantage=torch.zeros(32)), RATES)

    assert agent.model.critic is None
    assert agent.adam.views["actor.layers.0.weight"][1].abs().max() > 0


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a_minibatch_of_one_transition_moves_the_policy(space: Any, fast: bool) -> None:
    agent = agent_with(space, fast=fast)
    batch = minibatch(agent, 1)
    for advantage in (2.0, -2.0):
        one = batch._replace(advantage=torch.tensor([advantage]))
        before, _ = agent.score_batch(one.inputs, one.action)
        one = one._replace(log_prob=before)

        agent.update(one, RATES._replace(entropy_coef=0.0))

        after, _ = agent.score_batch(one.inputs, one.action)
        assert (after - before).item() * advantage > 0


def test_first_weights_are_orthogonal_or_torchs_own() -> None:
    ours, torchs_own = (
        agent_with(DISCRETE, orthogonal_init=each).model.actor.layers[0] for each in (True, False)
    )

    squared = ours.weight.T @ ours.weight  # the gain is the square root of 2
    torch.testing.assert_close(squared, 2.0 * torch.eye(3), atol=1e-5, rtol=0)
    assert ours.bias.abs().max() == 0.0
    assert not torch.allclose(torchs_own.weight.T @ torchs_own.weight, squared, atol=0.1)


@pytest.mark.parametrize("orthogonal_init", [True, False])
def test_the_seed_determines_the_weights_and_the_global_generator_does_not(
    orthogonal_init: bool,
) -> None:
    def weights(seed: int) -> list[float]:
        agent = agent_with(DISCRETE, seed=seed, orthogonal_init=orthogonal_init)
        return agent.adam.values.tolist()

    torch.manual_seed(1)
    first = weights(5)
    torch.manual_seed(2)

    assert weights(5) == first
    assert weights(6) != first


@pytest.mark.parametrize("box_policy", ["gaussian", "squashed", "gsde"])
def test_log_std_init_sets_the_first_log_std(box_policy: str) -> None:
    agent = agent_with(BOX, box_policy=box_policy, log_std_init=-1.5)

    assert agent.distribution.log_std.unique().tolist() == [-1.5]


def test_the_policy_sees_normalised_observations() -> None:
    agent, plain = agent_with(BOX, normalize_obs=True), agent_with(BOX)
    data = 100.0 + torch.randn(1, 500, 3, generator=torch.Generator().manual_seed(1))
    agent.learn_moments(data)

    action = agent.act_batch(np.full((1, 3), 100.0), deterministic=True)

    assert action == pytest.approx(plain.act_batch(np.zeros((1, 3)), deterministic=True), abs=2e-3)


def test_deterministic_actions_repeat_and_sampled_ones_differ() -> None:
    agent = agent_with(BOX)
    obs = np.zeros((5, 3), dtype=np.float32)

    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()
    assert agent.act_batch(obs).tolist() != agent.act_batch(obs).tolist()


@pytest.mark.parametrize(
    ("every_steps", "draws"),
    [(2, [0, 0, 1, 1, 2, 3, 3, 4]), (0, [0, 0, 0, 0, 0, 1, 1, 1])],
)
def test_sampled_actions_of_gsde_keep_their_noise_as_in_rollouts(
    every_steps: int, draws: list[int]
) -> None:
    agent = agent_with(BOX, box_policy="gsde", gsde_every_steps=every_steps, n_steps=5)
    obs = np.full((3, 3), 0.5, dtype=np.float32)

    actions = [tuple(agent.act_batch(obs).flatten().tolist()) for _ in draws]

    order = {action: n for n, action in enumerate(dict.fromkeys(actions))}
    assert [order[action] for action in actions] == draws


def test_a_loaded_agent_keeps_the_noise_of_the_saved_one() -> None:
    options = {"box_policy": "gsde", "gsde_every_steps": 4}
    agent, loaded = agent_with(BOX, **options), agent_with(BOX, seed=9, **options)
    obs = np.full((1, 3), 0.5, dtype=np.float32)
    before = agent.act_batch(obs).tolist()

    loaded.load_state_dict(agent.state_dict())

    expected = [agent.act_batch(obs).tolist() for _ in range(8)]
    assert [loaded.act_batch(obs).tolist() for _ in range(8)] == expected
    assert expected[2] == before != expected[3]


def test_another_number_of_envs_gets_new_noise() -> None:
    agent = agent_with(BOX, box_policy="gsde", gsde_every_steps=4)

    assert len(agent.act_batch(np.zeros((3, 3)))) == 3
    assert len(agent.act_batch(np.zeros((2, 3)))) == 2


def test_a_state_of_other_spaces_is_refused() -> None:
    state = agent_with(DISCRETE).state_dict()

    with pytest.raises(ValueError, match=r"action_space was \{.*'n': 4.*, and is \{.*'n': 5"):
        agent_with(spaces.Discrete(5)).load_state_dict(state)


def test_a_network_without_out_features_is_refused() -> None:
    with pytest.raises(UserError, match="network Flatten has no out_features"):
        agent_with(DISCRETE, network=lambda _: nn.Flatten())


def test_an_agent_learns_from_images_and_vectors_together() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (9, 9, 3), np.uint8), "arm": OBS})
    cnn = {"channels": [4], "kernels": [3], "strides": [2], "hidden_size": 8}
    agent = agent_with(DISCRETE, space, network=partial(DictNetwork, hidden_sizes=[8], cnn=cnn))

    agent.update(minibatch(agent), RATES)

    for name in ("actor.cnns.0.layers.0.weight", "actor.mlp.layers.0.weight"):
        assert agent.adam.views[name][1].abs().max() > 0, name


class WithDropout(MLP):
    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space)
        self.layers.append(nn.Dropout(0.5))


def test_dropout_is_on_for_the_gradient_only() -> None:
    agent = agent_with(BOX, network=WithDropout)
    obs = np.ones((4, 3), dtype=np.float32)
    batch = minibatch(agent)

    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()
    still = RATES._replace(learning_rate=0.0)
    first, second = (agent.update(batch, still).policy_loss for _ in range(2))
    assert not torch.equal(first, second)
    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()
