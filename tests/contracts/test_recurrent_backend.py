"""NumPy computes the same numbers for recurrent policies as ``TorchPPO``, up to rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_agents import agent_for
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.recurrent import Recurrent

N_STEPS, N_ENVS = 12, 6
OBS = spaces.Box(-3, 3, (4,), np.float32)
FIVE, BOX = spaces.Discrete(5), spaces.Box(-1, 1, (3,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.02)
MLP = {"_target_": "ml_pipeline.policy.networks.MLP", "hidden_sizes": [9]}

cells = pytest.mark.parametrize("cell", ["lstm", "gru"])


def agent_with(
    cell: str, action_space: spaces.Space[Any] = FIVE, *, fast: bool, **options: Any
) -> PPOAgent:
    network = partial(Recurrent, cell=cell, size=7, encoder=MLP)
    options = {"n_minibatches": 2, **options}
    agent: PPOAgent = agent_for(OBS, action_space, network, fast=fast, **options)
    agent.model.policy_head.weight.data.mul_(100.0)  # the actions now differ in probability
    for name, bias in agent.model.named_parameters():
        if "bias" in name:  # zero at first, which hides mistakes
            bias.data.copy_(torch.linspace(-0.5, 0.4, bias.numel()))
    return agent


class Played:
    """Random sequences, in which episodes end, and an older policy."""

    def __init__(self, agent: PPOAgent, *, is_masked: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        mask = torch.rand(N_STEPS, N_ENVS, 5, generator=generator) < 0.6
        mask[..., 0] = True
        start = torch.rand(N_STEPS, N_ENVS, generator=generator) < 0.2
        assert start[0].any()
        assert start[1:].any(dim=1).sum() > 3
        memory = drawn(N_ENVS, agent.memory_size)
        obs = 2.0 * drawn(N_STEPS, N_ENVS, 4)
        self.inputs = PolicyInput(obs, mask if is_masked else None, memory, start)
        self.noise = agent.draw_noise(N_STEPS, N_ENVS, generator)
        noise_row = agent.distribution.noise_row
        sampled = [
            agent.sample_batch(self.step(t), self.noise[noise_row(t)]).action
            for t in range(N_STEPS)
        ]
        action = torch.stack(sampled)
        log_prob, value = agent.score_batch(self.inputs, action)
        shift = torch.where(drawn(N_STEPS, N_ENVS) > 0, 0.5, -0.01)  # far from the clip range
        self.rollout = Minibatch(
            self.inputs,
            action,
            log_prob + shift,
            value + 0.3,
            3.0 * drawn(N_STEPS, N_ENVS),
            drawn(N_STEPS, N_ENVS),
        )
        self.order = torch.randperm(N_ENVS, generator=generator).view(2, -1)

    def step(self, t: int) -> PolicyInput:
        return self.inputs.mapped(lambda field: field[t], self.inputs.memory)


CASES: dict[str, tuple[spaces.Space[Any], dict[str, Any]]] = {
    "discrete": (FIVE, {}),
    "box": (BOX, {"clip_value_loss": True, "normalize_advantage": False}),
    "normalised": (FIVE, {"normalize_obs": True, "clip_obs": 1.5, "dual_clip": 1.5}),
    "masked": (FIVE, {"action_mask": "info"}),
}


@cells
@pytest.mark.parametrize("case", CASES)
def test_actions_states_scores_values_and_an_epoch_equal_torchs(cell: str, case: str) -> None:
    action_space, options = CASES[case]
    fast, plain = (agent_with(cell, action_space, fast=each, **options) for each in (True, False))
    played = Played(plain, is_masked=case == "masked")
    for agent in (fast, plain):
        agent.learn_moments(played.inputs.obs)
    assert type(fast.backend).__name__ == "RecurrentNumpyPPO"

    one = played.step(0)
    samples = [agent.sample_batch(one, played.noise[0]) for agent in (fast, plain)]
    torch.testing.assert_close(samples[0].action, samples[1].action)
    torch.testing.assert_close(samples[0].memory, samples[1].memory)
    with torch.no_grad():
        outputs = [agent.backend.outputs(one) for agent in (fast, plain)]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(fast.value_batch(one), plain.value_batch(one))
    scores = [agent.score_batch(played.inputs, played.rollout.action) for agent in (fast, plain)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)

    tables = [agent.epoch(played.rollout, played.order, RATES) for agent in (fast, plain)]
    torch.testing.assert_close(tables[0].float(), tables[1], rtol=1e-4, atol=1e-5)
    gradients = [agent.adam.grad / agent.adam.grad.norm() for agent in (fast, plain)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(fast.adam.moments, plain.adam.moments, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fast.adam.values, plain.adam.values, rtol=1e-4, atol=1e-4)


@cells
def test_every_gradient_of_a_recurrent_policy_equals_torchs(cell: str) -> None:
    fast, plain = (agent_with(cell, fast=each, max_grad_norm=1e9) for each in (True, False))
    batch = Played(plain).rollout

    for agent in (fast, plain):
        assert agent.update(batch, RATES).finite

    for name, (_, gradient) in plain.adam.views.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(fast.adam.views[name][1], gradient, rtol=1e-3, atol=1e-5)


@cells
def test_steps_one_by_one_equal_the_whole_sequence(cell: str) -> None:
    agent = agent_with(cell, fast=True)
    played = Played(agent)
    memory = played.inputs.memory
    values = []
    for t in range(N_STEPS):
        step = played.step(t)._replace(memory=memory)
        values.append(agent.value_batch(step))
        memory = agent.sample_batch(step, played.noise[t]).memory

    _, value = agent.score_batch(played.inputs, played.rollout.action)

    torch.testing.assert_close(torch.stack(values), value, rtol=1e-5, atol=1e-5)


@cells
def test_a_reset_clears_a_nan_in_the_recurrent_state(cell: str) -> None:
    agents = [agent_with(cell, fast=each) for each in (True, False)]
    played = Played(agents[1])
    played.inputs.memory[2] = torch.nan  # type: ignore[index]
    played.inputs.episode_start[0, 2] = True  # type: ignore[index]

    (_, ours), (_, theirs) = (
        agent.score_batch(played.inputs, played.rollout.action) for agent in agents
    )

    assert torch.isfinite(theirs).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(agent.update(played.rollout, RATES).finite for agent in agents)


@cells
def test_a_sequence_with_a_nan_changes_nothing(cell: str) -> None:
    agent = agent_with(cell, fast=True, on_nonfinite="skip")
    played = Played(agent)
    played.rollout.advantage[3, played.order[0, 0]] = torch.nan
    before = agent.adam.values.clone()

    finite = agent.epoch(played.rollout, played.order[:1], RATES)[:, -1]

    assert finite.tolist() == [0.0]
    assert agent.adam.values.equal(before)


@cells
def test_a_greedy_recurrent_policy_updates_the_state_it_is_given(cell: str) -> None:
    fast, plain = (agent_with(cell, fast=each) for each in (True, False))
    obs = np.random.default_rng(1).normal(size=(N_ENVS, 4)).astype(np.float32)
    memories = [agent.new_memory(N_ENVS) for agent in (fast, plain)]

    for _ in range(3):
        actions = [
            agent.act_batch(obs, deterministic=True, memory=memory).tolist()
            for agent, memory in zip((fast, plain), memories, strict=True)
        ]
        assert actions[0] == actions[1]

    torch.testing.assert_close(memories[0], memories[1])
    assert memories[0] is not None
    assert memories[0].abs().max() > 0.1


class Doubled(Recurrent):
    pass


def two_layers(space: Any) -> nn.Module:
    network = Recurrent(space, size=7, encoder=MLP)
    network.cell = nn.LSTM(9, 7, num_layers=2)
    return network


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (partial(Doubled, encoder=MLP), {}),
        (partial(Recurrent, encoder={**MLP, "activation": "elu"}), {}),
        (Recurrent, {}),  # its encoder is a DictNetwork
        (two_layers, {}),
        (partial(Recurrent, encoder=MLP), {"shared_trunk": True}),
        (partial(Recurrent, encoder=MLP), {"box_policy": "gsde"}),
    ],
    ids=["subclass", "elu", "DictNetwork", "two layers", "shared", "gsde"],
)
def test_other_recurrent_networks_use_torch(network: Any, options: dict[str, Any]) -> None:
    agent = agent_for(OBS, BOX, network, **options)

    assert type(agent.backend).__name__ == "TorchPPO"


def test_an_edited_cell_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "_run", lambda self, encoded, state: (encoded, state))

    agent = agent_with("lstm", fast=True)

    assert type(agent.backend).__name__ == "TorchPPO"
    assert "Recurrent._run was edited" in agent.check_fast()
