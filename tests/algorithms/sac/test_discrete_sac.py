"""SAC for discrete actions: exact means, masks, and the target entropy, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.agent import UpdateNoise
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.networks import Critics
from ml_pipeline.algorithms.sac.agent import SACAgent, actor_loss, soft_target
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.sac.soft_actions import DiscreteActions
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.distributions import FORBIDDEN, ActionSpaceError, Categorical
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext

CPU = torch.device("cpu")
NO_DRAWS = UpdateNoise(torch.Generator(), torch.device("cpu"))


class Table(nn.Module):
    """Gives every state the same action values."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, obs: Tensor) -> Tensor:
        return self.values.expand(len(obs), -1)


def made(n_actions: int, **settings: Any) -> SACAgent:
    context = RunContext.alone(seed=1)
    observations: Any = spaces.Box(-1, 1, (3,), np.float32)
    action: Any = spaces.Discrete(n_actions, start=5)
    return SACAgent(Spaces(observations, action), MLP, SACConfig(**settings), context)


def batch_of(n: int, n_actions: int, mask: Tensor | None = None) -> ReplayBatch:
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, n, 3, generator=generator)
    inputs = [PolicyInput(each, mask, None, None) for each in obs]
    action = torch.randint(n_actions, (n,), generator=generator)
    rest = inputs[1], torch.full((n,), 0.9), torch.ones(n)
    return ReplayBatch(inputs[0], action, torch.ones(n), *rest)


def test_target_and_actor_loss_by_hand() -> None:
    actions = DiscreteActions(Categorical(spaces.Discrete(2)))
    critics = Critics([Table([1.0, 2.0]), Table([3.0, 0.0])])  # minimum: 1, 0
    outputs = torch.tensor([[0.75, 0.25]]).log().requires_grad_()

    soft = actions.soft_value(critics, torch.zeros(1, 3), outputs, NO_DRAWS)
    target = soft_target(torch.tensor([2.0]), torch.tensor([0.5]), soft, torch.tensor(0.1))
    loss = actor_loss(soft, torch.tensor(0.1))
    loss.backward()

    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert soft.log_prob.item() == pytest.approx(-entropy)
    assert target.item() == pytest.approx(2.0 + 0.5 * (0.75 * 1.0 + 0.1 * entropy))
    assert loss.item() == pytest.approx(-0.1 * entropy - 0.75)
    # d loss / d logit = prob * (cost - mean cost), with cost = 0.1 * log prob - value.
    costs = [0.1 * math.log(0.75) - 1.0, 0.1 * math.log(0.25) - 0.0]
    mean = 0.75 * costs[0] + 0.25 * costs[1]
    expected = [0.75 * (costs[0] - mean), 0.25 * (costs[1] - mean)]
    assert outputs.grad is not None
    assert outputs.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_forbidden_actions_add_nothing() -> None:
    allowed = DiscreteActions(Categorical(spaces.Discrete(2)))
    masked = DiscreteActions(Categorical(spaces.Discrete(3)))
    logits = torch.tensor([[0.3, -0.2]])
    outputs = torch.tensor([[0.3, FORBIDDEN, -0.2]], requires_grad=True)

    plain = allowed.soft_value(Critics([Table([1.0, 2.0])]), torch.zeros(1, 3), logits, NO_DRAWS)
    soft = masked.soft_value(
        Critics([Table([1.0, 1e6, 2.0])]), torch.zeros(1, 3), outputs, NO_DRAWS
    )
    actor_loss(soft, torch.tensor(0.1)).backward()

    torch.testing.assert_close(torch.stack(soft).detach(), torch.stack(plain))
    assert outputs.grad is not None
    assert outputs.grad[0, 1].item() == 0.0


def test_values_of_the_actions_taken() -> None:
    actions = DiscreteActions(Categorical(spaces.Discrete(3)))
    critics = Critics([Table([1.0, 2.0, 3.0]), Table([10.0, 20.0, 30.0])])

    values = actions.taken(critics, torch.zeros(2, 3), torch.tensor([2, 0]))

    assert values.tolist() == [[3.0, 1.0], [30.0, 10.0]]


@pytest.mark.parametrize(
    ("mask", "entropy"),
    [
        (None, math.log(4)),
        ([[1, 1, 0, 0], [1, 1, 0, 0]], math.log(2)),
        ([[1, 1, 1, 1], [0, 0, 0, 1]], 0.5 * math.log(4)),  # 0 in the second state
    ],
)
def test_gradient_of_the_temperature_by_hand(mask: Any, entropy: float) -> None:
    agent = made(4)
    with torch.no_grad():
        agent.actor.head.weight.zero_()  # an even choice between the allowed actions
        agent.actor.head.bias.zero_()
    given = None if mask is None else torch.tensor(mask, dtype=torch.bool)

    result = agent.update(batch_of(2, 4, given), agent.rates(0.0, 1e-3))

    assert result.entropy.item() == pytest.approx(entropy)
    # The gradient of log temperature is entropy - target, and the target is half the maximum.
    assert agent.adams["temperature"].grad.item() == pytest.approx(0.5 * entropy, abs=1e-6)
    assert agent.temperature().item() < 1.0  # too random


def test_two_actions_reach_the_default_target() -> None:
    target = made(2).target_entropy(None)
    share = 0.89

    assert target == pytest.approx(0.5 * math.log(2))
    near = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert near == pytest.approx(target, abs=1e-3)
    assert made(2, target_entropy=0.1).target_entropy(None) == 0.1


def test_random_actions_and_sampled_actions_obey_the_mask() -> None:
    agent = made(4, action_mask="info")
    n = 4000
    obs = np.zeros((n, 3), np.float32)
    mask = np.tile(np.array([True, False, True, False]), (n, 1))
    noise = agent.draw_noise(1, n, torch.Generator().manual_seed(0))[0]
    inputs = agent.inputs(agent.reader.read(obs), mask)

    random = agent.explore(inputs, noise, agent.rates(0.0, 1e-3), is_random=True).action
    sampled = agent.act_batch(obs, action_mask=mask)
    greedy = agent.act_batch(obs, True, action_mask=mask)

    assert torch.bincount(random, minlength=4).tolist() == pytest.approx(
        [2000, 0, 2000, 0], abs=150
    )
    assert set(sampled.tolist()) == {5, 7}  # the space starts at 5
    assert len(set(greedy.tolist())) == 1


def test_layer_norm_leaves_the_values_alone() -> None:
    agent = made(4, critic_layer_norm=True)

    norms = [m for m in agent.critics.modules() if isinstance(m, nn.LayerNorm)]

    assert [norm.normalized_shape for norm in norms] == [(64,)] * 4
    assert all(isinstance(critic.head, nn.Linear) for critic in agent.critics)


def test_multidiscrete_is_refused() -> None:
    context = RunContext.alone(seed=1)
    observations: Any = spaces.Box(-1, 1, (3,), np.float32)
    action: Any = spaces.MultiDiscrete([2, 3])

    with pytest.raises(ActionSpaceError, match=r"agent=sac: .* is not a Box or Discrete"):
        SACAgent(Spaces(observations, action), MLP, SACConfig(), context)
