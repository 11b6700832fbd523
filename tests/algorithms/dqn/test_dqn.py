"""DQNAgent: its loss and target by hand, exploration, masks, branches and quantiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.algorithms.dqn import agent as dqn
from ml_pipeline.algorithms.dqn.agent import DQNAgent, ValueHead, dqn_loss
from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.distributions import Categorical, MultiCategorical
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.observations import batched
from ml_pipeline.training.contracts import Envs, RunContext

CPU = torch.device("cpu")


def made(action_space: Any = None, *, activation: str = "tanh", **settings: Any) -> DQNAgent:
    context = RunContext.alone(seed=1)
    box = spaces.Box(-1, 1, (2,), np.float32)
    config = DQNConfig(**{"action_mask": "none", **settings})
    network: Any = partial(MLP, activation=activation)
    return DQNAgent(Spaces(box, action_space or spaces.Discrete(3)), network, config, context)


def batch_of(agent: DQNAgent, n: int, **changes: Any) -> ReplayBatch:
    generator = torch.Generator().manual_seed(0)
    inputs = [PolicyInput(torch.randn(n, 2, generator=generator), None, None, None)] * 2
    shape = (n, *agent.distribution.action_shape)
    fields = ReplayBatch(
        inputs[0],
        torch.randint(2, shape, generator=generator),
        torch.arange(n, dtype=torch.float32),
        inputs[1],
        torch.full((n,), 0.5),
        torch.ones(n),
    )
    return fields._replace(**changes)


def test_the_loss_is_a_weighted_huber_loss_of_the_td_error() -> None:
    chosen = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)  # one quantile, one choice
    target, weight = torch.tensor([[1.5], [5.0], [3.0]]), torch.tensor([1.0, 0.5, 1.0])

    loss, error = dqn_loss(chosen, target, weight)

    # 0.5 * 0.5^2, and |3| - 0.5 with weight 0.5
    assert loss.item() == pytest.approx((0.125 + 0.5 * 2.5 + 0.0) / 3)
    assert error.tolist() == [0.5, 3.0, 0.0]


def test_the_quantile_loss_is_smallest_at_the_quantiles_of_the_target() -> None:
    target = torch.tensor([[0.0, 10.0, 20.0, 30.0]])
    best, shifted = target.reshape(1, 4, 1), target.reshape(1, 4, 1) + 4.0

    losses = [dqn_loss(each, target, torch.ones(1))[0].item() for each in (best, shifted)]

    assert losses[0] < losses[1]


@pytest.mark.parametrize("double", [False, True])
def test_the_target_uses_the_true_successor_and_stops_at_a_terminal(double: bool) -> None:
    agent = made(double=double, duelling=False)
    with torch.no_grad():
        for module, values in ((agent.model, [1.0, 5.0, 3.0]), (agent.target, [9.0, 2.0, 4.0])):
            module.head.advantage.weight.zero_()
            module.head.advantage.bias.copy_(torch.tensor(values))

    batch = batch_of(agent, 2, discount=torch.tensor([0.5, 0.0]))
    target = agent._target(batch).flatten().tolist()

    # The online network prefers action 1, which the target network values at 2; its own best is 9.
    assert target == [0.0 + 0.5 * (2.0 if double else 9.0), 1.0]


def test_forbidden_actions_are_neither_taken_nor_bootstrapped_from() -> None:
    agent = made(double=False, duelling=False, action_mask="info")
    with torch.no_grad():
        for module in (agent.model, agent.target):
            module.head.advantage.weight.zero_()
            module.head.advantage.bias.copy_(torch.tensor([1.0, 5.0, 3.0]))
    allowed = torch.tensor([[True, False, True], [True, True, True]])
    batch = batch_of(agent, 2, discount=torch.ones(2))
    next_inputs = batch.next_inputs._replace(action_mask=allowed)

    target = agent._target(batch._replace(next_inputs=next_inputs)).flatten().tolist()
    inputs = PolicyInput(torch.zeros(2000, 2), allowed[:1].expand(2000, 3), None, None)
    noise = agent.draw_noise(1, 2000, torch.Generator().manual_seed(0))[0]
    drawn = agent.sample_batch(inputs, noise, 1.0).action.bincount(minlength=3)
    greedy = agent.act_batch(np.zeros((2, 2)), True, action_mask=allowed.numpy())

    assert target == [0.0 + 3.0, 1.0 + 5.0]
    assert drawn.tolist() == [pytest.approx(1000, abs=100), 0, pytest.approx(1000, abs=100)]
    assert greedy.tolist() == [2, 1]


def test_epsilon_is_the_share_of_random_actions_and_falls_to_its_end() -> None:
    config = DQNConfig(epsilon_start=1.0, epsilon_end=0.1, epsilon_share=0.5)

    assert [config.epsilon(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1, 0.55, 0.1, 0.1])
    agent = made()
    noise = agent.draw_noise(1, 5000, torch.Generator().manual_seed(0))[0]
    inputs = PolicyInput(torch.zeros(5000, 2), None, None, None)
    greedy = agent.act_batch(np.zeros((1, 2)), True)[0]
    n_other = (agent.sample_batch(inputs, noise, 0.3).action != greedy).sum().item()
    assert n_other / 5000 == pytest.approx(0.3 * 2 / 3, abs=0.03)


def test_duelling_advantages_have_mean_zero_within_each_choice() -> None:
    distribution = MultiCategorical(spaces.MultiDiscrete([2, 3]))
    head = ValueHead(4, distribution, n_quantiles=1, duelling=True)
    features = torch.randn(5, 4)

    values = head(features)
    state_value = head.value(features)  # type: ignore[misc]

    torch.testing.assert_close(values[:, :2].mean(dim=1, keepdim=True), state_value)
    torch.testing.assert_close(values[:, 2:].mean(dim=1, keepdim=True), state_value)
    assert Categorical(spaces.Discrete(3)).by_choice(torch.zeros(7, 3)).shape == (7, 1, 3)


def test_tuple_of_choices_is_valued_like_a_multi_discrete_action() -> None:
    parts = spaces.Tuple((spaces.Discrete(2, start=5), spaces.Dict(a=spaces.MultiDiscrete([4, 3]))))
    agents = [made(space, n_quantiles=2) for space in (parts, spaces.MultiDiscrete([2, 4, 3]))]

    updates = [each.update(batch_of(each, 8), each.rates(0.0, 1e-3)) for each in agents]

    assert torch.equal(updates[0].error, updates[1].error)
    assert torch.equal(agents[0].adam.values, agents[1].adam.values)
    first, nested = agents[0].act_batch(np.ones((3, 2)), True)
    choices = agents[1].act_batch(np.ones((3, 2)), True)
    assert np.array_equal(first - 5, choices[:, 0])
    assert np.array_equal(nested["a"], choices[:, 1:])


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 4])])
@pytest.mark.parametrize("n_quantiles", [1, 5])
@pytest.mark.slow
def test_updates_reach_a_fixed_target(space: Any, n_quantiles: int) -> None:
    agent = made(space, n_quantiles=n_quantiles, learning_rate=1e-2, target_every=1)
    batch = batch_of(agent, 32, discount=torch.zeros(32), reward=torch.linspace(-1, 1, 32))
    rates = agent.rates(0.0, 1e-2)

    errors = [agent.update(batch, rates).error.mean().item() for _ in range(150)]

    assert errors[-1] < 0.3 * errors[0]


def test_the_target_network_is_replaced_every_so_many_updates() -> None:
    agent = made(target_every=3)
    first = agent._target_values.clone()
    changed = []
    for _ in range(6):
        agent.update(batch_of(agent, 8), agent.rates(0.0, 1e-3))
        changed.append(not torch.equal(agent._target_values, first))

    assert changed == [False, False, True, True, True, True]
    assert torch.equal(agent._target_values, agent.adam.values)


CASES: list[dict[str, Any]] = [
    {},
    {"double": False},
    {"duelling": False},
    {"normalize_obs": True},
    {"action_mask": "info"},
]


@pytest.mark.parametrize("settings", CASES, ids=lambda each: " ".join(each) or "default")
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_numpy_computes_the_same_as_torch(settings: dict[str, Any], activation: str) -> None:
    agent = made(activation=activation, **settings)
    agent.learn_moments(torch.randn(100, 2, generator=torch.Generator().manual_seed(1)) * 3 + 1)
    batch = random_batch(agent)
    assert agent.check_fast() == ""
    assert agent.fast is not None

    ours = torch.from_numpy(agent.fast.values(batch.inputs)), *agent.fast.gradient(batch)
    our_gradient = agent.adam.grad.clone()
    theirs = agent.plain_values(batch.inputs), *agent.plain_gradient(batch)

    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.as_tensor(one).float(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradient, agent.adam.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(16),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-2, 3]]),
        spaces.MultiBinary((2, 3)),
    ],
    ids=str,
)
def test_numpy_computes_the_same_as_torch_for_choices(space: Any) -> None:
    context, n = RunContext.alone(seed=1), 64
    agent = DQNAgent(Spaces(space, spaces.Discrete(3)), MLP, DQNConfig(), context)
    space.seed(0)
    drawn = [batched(space, [space.sample() for _ in range(n)]) for _ in range(2)]
    obs, next_obs = (agent.inputs(agent.reader.read(each)) for each in drawn)
    batch = random_batch(agent, n)._replace(inputs=obs, next_inputs=next_obs)
    assert agent.fast is not None

    ours = torch.from_numpy(agent.fast.values(obs)), *agent.fast.gradient(batch)
    our_gradient = agent.adam.grad.clone()
    theirs = agent.plain_values(obs), *agent.plain_gradient(batch)

    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.as_tensor(one).float(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradient, agent.adam.grad, rtol=1e-4, atol=1e-6)


def random_batch(agent: DQNAgent, n: int = 128) -> ReplayBatch:
    """Transitions with TD errors on both sides of the Huber loss."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for _ in range(2):
        mask = None
        if agent.masks.are_used:
            mask = torch.rand(n, agent.distribution.n_outputs, generator=generator) < 0.7
            mask[:, 0] = True
        obs = torch.randn(n, 2, generator=generator)
        inputs.append(PolicyInput(obs, mask, None, None))
    return ReplayBatch(
        inputs[0],
        torch.randint(agent.distribution.n_outputs, (n,), generator=generator),
        3.0 * torch.randn(n, generator=generator),
        inputs[1],
        agent.config.gamma * (torch.rand(n, generator=generator) < 0.8),
        torch.rand(n, generator=generator),
    )


def test_an_edited_loss_switches_numpy_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def edited(chosen: Any, target: Any, weight: Any) -> Any:
        loss, error = dqn_loss(chosen, target, weight)
        return 1.01 * loss, error

    agent, plain = made(), made(fast="off")
    monkeypatch.setattr(dqn, "dqn_loss", edited)

    assert agent.check_fast() == "plain torch runs instead of NumpyDQN: dqn_loss was edited"
    assert agent.fast is None
    assert plain.fast is None
    assert made(n_quantiles=5).fast is None
    assert made(spaces.MultiDiscrete([2, 2])).fast is None


def test_trainer_of_a_script_without_hydra_uses_an_edited_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return dqn_loss(*given)

    config = DQNConfig(learning_starts=16, batch_size=8, iteration_length=16)
    env = SerialEnv([lambda: gym.make("CartPole-v1")] * 2, seed=1)
    env_spaces = Spaces(env.single_observation_space, env.single_action_space)
    agent = DQNAgent(env_spaces, MLP, config, RunContext.alone())
    monkeypatch.setattr(dqn, "dqn_loss", counted)

    trainer = OffPolicyTrainer(agent, Envs([env], 1, False), config, RunContext.alone())
    trainer.train_episode_vectorized()

    assert len(calls) == trainer.n_updates > 0
