"""SACAgent and SquashedPolicy: densities, losses by hand, temperature, and critics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.sac.agent import SACAgent, actor_loss, critic_loss, soft_target
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.sac.soft_actions import SoftValue, SquashedPolicy
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext

CPU = torch.device("cpu")
ACTIONS = spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 10.0]))


def made(**settings: Any) -> SACAgent:
    context = RunContext.alone(seed=1)
    observations: Any = spaces.Box(-1, 1, (3,), np.float32)
    return SACAgent(Spaces(observations, ACTIONS), MLP, SACConfig(**settings), context)


def batch_of(n: int) -> ReplayBatch:
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, n, 3, generator=generator)
    inputs = [PolicyInput(each, None, None, None) for each in obs]
    action = torch.rand(n, 2, generator=generator) * 2 - 1
    return ReplayBatch(
        inputs[0], action, torch.ones(n), inputs[1], torch.full((n,), 0.9), torch.ones(n)
    )


def test_log_probs_are_a_density_over_the_stored_actions() -> None:
    policy = SquashedPolicy(spaces.Box(np.float32([-2.0]), np.float32([6.0])))
    outputs = torch.tensor([[0.3, -0.5]]).expand(4001, 2)
    action = torch.linspace(-1 + 1e-4, 1 - 1e-4, 4001)[:, None]

    log_prob, _ = policy.log_prob_and_entropy(outputs, action)
    env_action = torch.from_numpy(policy.to_env(action.numpy())).flatten()
    mass = torch.trapezoid(log_prob.exp(), action.flatten()).item()

    assert mass == pytest.approx(1.0, abs=5e-3)
    assert (env_action.min().item(), env_action.max().item()) == pytest.approx((-2, 6), abs=1e-2)


def test_sampled_actions_have_the_log_prob_that_scoring_gives() -> None:
    policy = SquashedPolicy(ACTIONS)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 4, generator=generator) * 0.5
    noise = torch.randn(50, 2, generator=generator)

    action, log_prob = policy.sample_and_log_prob(outputs, noise)

    scored, _ = policy.log_prob_and_entropy(outputs, action)  # atanh loses digits near 1
    torch.testing.assert_close(scored, log_prob, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(policy.sample(outputs, noise), action)
    uniform = policy.uniform(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    assert torch.histc(uniform, 4, -1, 1).div(5000).tolist() == pytest.approx([1.0] * 4, abs=0.05)


def test_log_prob_by_hand() -> None:
    """SB3's SquashedDiagGaussianDistribution: normal log-density - log(1 - tanh(u)^2)."""
    mean, deviation, noise = 0.3, 0.5, 1.2
    outputs = torch.tensor([[mean, math.log(deviation)]])
    raw = mean + deviation * noise
    density = -0.5 * noise**2 - math.log(deviation) - 0.5 * math.log(2.0 * math.pi)

    for bound in (1e-3, 1.0, 500.0):
        policy = SquashedPolicy(spaces.Box(-bound, bound, (1,), np.float32))
        _, log_prob = policy.sample_and_log_prob(outputs, torch.tensor([[noise]]))

        assert log_prob.item() == pytest.approx(density - math.log(1.0 - math.tanh(raw) ** 2))


@pytest.mark.parametrize("is_older", [False, True])
def test_an_old_state_keeps_log_probs_in_the_units_of_the_env(is_older: bool) -> None:
    agent, outputs, noise = made(), torch.zeros(1, 4), torch.zeros(1, 2)
    _, log_prob = agent.actions.distribution.sample_and_log_prob(outputs, noise)
    state = made().state_dict()
    last_actor = state.pop("kept")["last_actor"]
    old = {"last_actor": list(last_actor)} if is_older else {"kept": {"last_actor": last_actor}}

    agent.load_state_dict({**state, **old})
    resumed = made()
    resumed.load_state_dict(agent.state_dict())

    for each in (agent, resumed):
        _, in_units = each.actions.distribution.sample_and_log_prob(outputs, noise)
        volume = math.log(2.0) + math.log(5.0)  # half the widths of the bounds
        assert (log_prob - in_units).item() == pytest.approx(volume)


def test_losses_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    target, weight, log_prob = torch.tensor([2.0, 2.0]), torch.ones(2), torch.tensor([0.5, -1.0])
    soft, temperature = SoftValue(values.amin(dim=0), log_prob), torch.tensor(0.1)

    assert critic_loss(values, target, weight).item() == 0.5 * ((1 + 0) / 2 + (1 + 4) / 2)
    expected = ((0.1 * 0.5 - 1.0) + (0.1 * -1.0 - 0.0)) / 2
    assert actor_loss(soft, temperature).item() == pytest.approx(expected)
    target = soft_target(torch.ones(2), torch.tensor([0.9, 0.0]), soft, temperature)
    assert target.tolist() == pytest.approx([1 + 0.9 * (1.0 - 0.1 * 0.5), 1.0])  # 0: terminated


def test_the_temperature_rises_below_the_target_entropy_and_falls_above_it() -> None:
    for target, rises in ((100.0, True), (-100.0, False)):
        agent = made(target_entropy=target)
        before = agent.temperature().item()
        agent.update(batch_of(16), agent.rates(0.0, 1e-3))

        assert (agent.temperature().item() > before) == rises
    fixed = made(temperature=0.2)
    fixed.update(batch_of(16), fixed.rates(0.0, 1e-3))
    assert fixed.temperature().item() == pytest.approx(0.2)
    assert made().target_entropy(None) == -2.0


def test_the_actors_loss_does_not_train_the_critics() -> None:
    agent = made(policy_delay=2)
    batch, rates = batch_of(16), agent.rates(0.0, 1e-3)
    actor = agent.adams["actor"].values.clone()

    agent.update(batch, rates)
    assert torch.equal(agent.adams["actor"].values, actor)  # not its turn
    critics = agent.adams["critics"].values.clone()
    agent._update_actor(agent.preprocess(batch.inputs.obs), None, rates)

    assert not torch.equal(agent.adams["actor"].values, actor)
    assert torch.equal(agent.adams["critics"].values, critics)


def test_the_targets_move_by_tau() -> None:
    agent = made(tau=0.25)
    before = agent.target_values.clone()

    agent.update(batch_of(16), agent.rates(0.0, 1e-3))

    moved = before + 0.25 * (agent.adams["critics"].values - before)
    torch.testing.assert_close(agent.target_values, moved)


def test_the_two_critics_differ_and_layer_norm_is_added_to_hidden_layers_only() -> None:
    agent, normed = made(), made(critic_layer_norm=True)
    obs, action = torch.randn(5, 3), torch.zeros(5, 2)

    values = agent.critics(obs, action)
    norms = [m for m in normed.critics.modules() if isinstance(m, torch.nn.LayerNorm)]

    assert values.shape == (2, 5)
    assert not torch.allclose(values[0], values[1])
    assert [norm.normalized_shape for norm in norms] == [(64,)] * 4


def test_images_and_dicts_are_supported() -> None:
    context = RunContext.alone(seed=1)
    camera = spaces.Box(0, 255, (3, 4, 4), np.uint8)
    both = spaces.Dict({"camera": camera, "speed": spaces.Box(-1, 1, (2,), np.float32)})
    agent = SACAgent(Spaces(both, ACTIONS), MLP, SACConfig(), context)
    obs = {"camera": np.zeros((5, 3, 4, 4), np.uint8), "speed": np.zeros((5, 2), np.float32)}

    action = agent.act_batch(obs, True)

    assert action.shape == (5, 2)
    assert np.all(action >= ACTIONS.low)
    assert np.all(action <= ACTIONS.high)
    assert math.isfinite(float(action.sum()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy_delay": 2, "max_grad_norm": 0.1},
        {"temperature": 0.2, "normalize_obs": True},
        {"critic_layer_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_gradients_by_hand_train_as_autograd_does(
    settings: dict[str, Any], activation: str, is_joined: bool
) -> None:
    def network(space: Any) -> MLP:
        return MLP(space, (16, 16), activation)

    context, observations = RunContext.alone(seed=1), spaces.Box(-1, 1, (3,))
    agents = [
        SACAgent(Spaces(observations, ACTIONS), network, SACConfig(fast=fast, **settings), context)
        for fast in ("auto", "off")
    ]
    assert [agent.fast is None for agent in agents] == [False, True]
    if is_joined and agents[0].fast is not None:
        agents[0].fast._on_cpu = False  # a GPU joins products; the numbers must be the same
    for step in range(20):
        batch = batch_of(16)._replace(reward=torch.full((16,), float(step)))
        results = [agent.update(batch, agent.rates(0.0, 1e-2)) for agent in agents]
        for ours, theirs in zip(*results, strict=True):
            assert float(ours) == pytest.approx(float(theirs), rel=2e-3, abs=2e-3)
    for name, adam in agents[0].adams.items():
        torch.testing.assert_close(adam.values, agents[1].adams[name].values, rtol=0, atol=2e-3)
    torch.testing.assert_close(agents[0].target_values, agents[1].target_values, rtol=0, atol=1e-3)


def test_a_changed_loss_or_network_switches_the_hand_written_gradients_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = made()
    before = {name: adam.values.clone() for name, adam in agent.adams.items()}
    assert agent.check_fast() == ""
    assert all(torch.equal(before[name], agent.adams[name].values) for name in before)
    assert made(box_policy="gsde").fast is None

    def doubled(soft: SoftValue, temperature: Any) -> Any:
        return 2.0 * actor_loss(soft, temperature)

    monkeypatch.setattr("ml_pipeline.algorithms.sac.agent.actor_loss", doubled)
    assert agent.check_fast() == "plain torch runs instead of MlpSAC: actor_loss was edited"
    assert agent.fast is None


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_another_head_switches_the_hand_written_gradients_off(part: str) -> None:
    agent = made()
    owner = agent.actor if part == "actor" else agent.critics[0]
    n_in, n_out = owner.head.in_features, owner.head.out_features
    owner.head = nn.Sequential(nn.Linear(n_in, 4), nn.Tanh(), nn.Linear(4, n_out))

    assert agent.check_fast() == "plain torch runs instead of MlpSAC: a network has changed"


def test_an_agent_trained_on_a_gpu_is_loaded_on_a_cpu() -> None:
    agent, state = made(), made().state_dict()
    state["update_generator"] = torch.arange(16, dtype=torch.uint8)  # as torch saves one of CUDA

    draws = []
    for _ in range(2):
        agent.load_state_dict(state)
        draws.append(torch.rand(4, generator=agent.update_generator))

    assert torch.equal(*draws)
    assert torch.equal(agent.kept["last_actor"], state["kept"]["last_actor"])
