"""PPOAgent: its update against a textbook PPO, each option, and what acting may change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.agents.distributions import ActionSpaceError
from ml_pipeline.agents.image_networks import DictNetwork
from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.observations import ObservationSpaceError
from ml_pipeline.agents.ppo import UPDATE_METRICS, MaskError, PPOAgent, Rates
from ml_pipeline.agents.recurrent import Recurrent
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Minibatch, PolicyInput

CPU = torch.device("cpu")
OBS = spaces.Box(-1, 1, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)


def agent_for(
    action_space: spaces.Space[Any], seed: int = 1, *, by_hand: bool = True, **options: Any
) -> PPOAgent:
    network = partial(MLP, hidden_sizes=(8,))
    config = PPOConfig(**options)
    return PPOAgent(OBS, action_space, network, config, device=CPU, seed=seed, by_hand=by_hand)


def seen(obs: Tensor, mask: Tensor | None = None) -> PolicyInput:
    return PolicyInput(obs, mask, None, None)


def minibatch(agent: PPOAgent, size: int = 32, *, masked: bool = False) -> Minibatch:
    generator = torch.Generator().manual_seed(3)
    obs = torch.randn(size, 3, generator=generator)
    mask = None
    if masked:
        mask = torch.rand(size, agent.distribution.mask_size, generator=generator) < 0.6
        mask[:, 0] = True
    inputs = seen(obs, mask)
    action = agent.sample_batch(inputs, agent.draw_noise(1, size, generator)[0]).action
    log_prob, value = agent.score_batch(inputs, action)
    # An older policy: ratios then lie on both sides of the clip range.
    log_prob = log_prob + 0.4 * torch.randn(size, generator=generator)
    value = value + 0.4 * torch.randn(size, generator=generator)
    advantage, target = (torch.randn(size, generator=generator) for _ in range(2))
    return Minibatch(inputs, action, log_prob, value, advantage, target)


def told(agent: PPOAgent, batch: Minibatch, rates: Rates = RATES) -> dict[str, float]:
    metrics = agent.update(batch, rates).metrics.tolist()
    return dict(zip(UPDATE_METRICS, metrics, strict=True))


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_one_update_equals_a_textbook_ppo(action_space: spaces.Space[Any], by_hand: bool) -> None:
    agent = agent_for(action_space, by_hand=by_hand, max_grad_norm=0.3)
    textbook = agent_for(action_space, by_hand=False)
    batch = minibatch(agent)

    metrics = told(agent, batch)
    loss = textbook_step(textbook, batch)

    for ours, theirs in zip(agent.model.parameters(), textbook.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    total = metrics["loss/policy"] + 0.5 * metrics["loss/value"] - 0.01 * metrics["policy/entropy"]
    assert total == pytest.approx(float(loss), rel=1e-4)
    assert 0.1 < metrics["policy/clip_fraction"] < 0.9


def textbook_step(agent: PPOAgent, batch: Minibatch) -> Tensor:
    """The formulas of the paper, with torch's distributions and a plain Adam."""
    model, obs = agent.model, batch.inputs.obs
    outputs = model.policy_head(model.actor(obs))
    if hasattr(model.distribution, "log_std"):
        normal = torch.distributions.Normal(outputs, model.distribution.log_std.exp())
        policy: Any = torch.distributions.Independent(normal, 1)
    else:
        policy = torch.distributions.Categorical(logits=outputs)
    ratio = torch.exp(policy.log_prob(batch.action) - batch.log_prob)
    advantage = batch.advantage - batch.advantage.mean()
    advantage = advantage / (batch.advantage.std(correction=0) + 1e-8)
    surrogate = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    value = model.value_head(model.critic(obs)).squeeze(1)
    value_loss = nn.functional.mse_loss(value, batch.value_target) / 2
    loss = -surrogate.mean() + 0.5 * value_loss - 0.01 * policy.entropy().mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss.detach()


# Each changes what is learned, in the plain arithmetic and, where it applies, by hand alike.
OPTIONS: dict[str, dict[str, Any]] = {
    "adam_eps": {"adam_eps": 1e-2},
    "value_coef": {"value_coef": 2.0},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "no advantage normalisation": {"normalize_advantage": False},
    "clipped value loss": {"clip_value_loss": True},
    "dual clip": {"dual_clip": 1.05},
}


@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_an_option_changes_the_update_by_hand_as_it_changes_autograds(
    action_space: spaces.Space[Any], options: dict[str, Any]
) -> None:
    by_hand = agent_for(action_space, **options)
    plain = agent_for(action_space, by_hand=False, **options)
    without = agent_for(action_space)
    batch = minibatch(by_hand)

    metrics = [told(agent, batch) for agent in (by_hand, plain)]
    told(without, batch)

    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    # A first step of Adam is the sign of the gradient: so the moments are compared.
    for name, moment in by_hand.adam.state_dict().items():
        torch.testing.assert_close(moment, plain.adam.state_dict()[name], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(by_hand.adam.values, plain.adam.values, rtol=1e-4, atol=1e-5)
    assert not torch.equal(by_hand.adam.values, without.adam.values)


def test_masked_updates_by_hand_equal_autograds_and_leave_what_is_forbidden_alone() -> None:
    by_hand, plain = (agent_for(DISCRETE, by_hand=each) for each in (True, False))
    batch = minibatch(by_hand, masked=True)
    batch.inputs.action_mask[:, 3] = False  # type: ignore[index]
    batch = batch._replace(action=batch.action.clamp(max=0))

    metrics = [told(agent, batch) for agent in (by_hand, plain)]

    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(by_hand.adam.values, plain.adam.values, rtol=1e-4, atol=1e-5)
    assert by_hand.adam.views["policy_head.bias"][1][3] == 0.0


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_acting_and_scoring_by_hand_equal_the_plain_way(activation: str) -> None:
    for space, masked in ((DISCRETE, True), (DISCRETE, False), (BOX, False)):
        agents = [
            PPOAgent(
                OBS,
                space,
                partial(MLP, activation=activation),
                PPOConfig(normalize_obs=True, clip_obs=1.0),
                device=CPU,
                seed=1,
                by_hand=by_hand,
            )
            for by_hand in (True, False)
        ]
        generator = torch.Generator().manual_seed(1)
        obs = torch.randn(64, 3, generator=generator)
        mask = torch.tensor([[True, False, True, True]]).expand(64, 4) if masked else None
        noise = agents[0].draw_noise(1, 64, generator)[0]
        results = []
        for agent in agents:
            agent.learn_moments(obs.unsqueeze(0))
            action = agent.sample_batch(seen(obs, mask), noise).action
            scores = agent.score_batch(seen(obs, mask), action)
            results.append((action, *scores, agent.value_batch(seen(obs))))
            greedy = agent.act_batch(obs.numpy(), True, action_mask=None)
            assert len(greedy) == 64
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_arithmetic_by_hand_is_taken_only_where_it_covers_the_model() -> None:
    assert agent_for(DISCRETE)._by_hand is not None
    for options in ({"shared_trunk": True}, {"box_policy": "gsde"}, {"box_policy": "squashed"}):
        assert agent_for(BOX, **options)._by_hand is None
    assert agent_for(spaces.MultiDiscrete([2, 2]))._by_hand is None


def test_the_annealed_rates_are_heeded() -> None:
    results = []
    for rates in (RATES, RATES._replace(clip_range=0.01), RATES._replace(entropy_coef=0.5)):
        agent = agent_for(DISCRETE)
        told(agent, minibatch(agent), rates)
        results.append(agent.adam.values.tolist())

    assert results[0] != results[1] != results[2] != results[0]


def test_a_shared_trunk_learns_from_both_losses() -> None:
    agent = agent_for(DISCRETE, shared_trunk=True)
    batch = minibatch(agent)

    told(agent, batch._replace(advantage=torch.zeros(32)))
    gradient = agent.adam.views["actor.layers.0.weight"][1].abs().max()

    assert agent.model.critic is None
    assert gradient > 0


def test_orthogonal_init_can_be_left_to_torch_and_the_seed_decides_it_too() -> None:
    def first_layer(**options: Any) -> Tensor:
        return agent_for(DISCRETE, **options).model.actor.layers[0].weight.detach()

    weight = first_layer()
    torch.testing.assert_close(weight.T @ weight, 2.0 * torch.eye(3), atol=1e-5, rtol=0)
    torch.manual_seed(9)
    other = first_layer(orthogonal_init=False)
    torch.manual_seed(8)
    assert torch.equal(other, first_layer(orthogonal_init=False))
    assert not torch.allclose(other.T @ other, 2.0 * torch.eye(3), atol=0.1)


def test_the_log_std_begins_where_it_is_told() -> None:
    for box_policy in ("gaussian", "squashed", "gsde"):
        agent = agent_for(BOX, box_policy=box_policy, log_std_init=-1.5)
        assert agent.distribution.log_std.unique().tolist() == [-1.5]


def test_normalised_observations_are_what_the_policy_sees() -> None:
    agent, plain = agent_for(BOX, normalize_obs=True), agent_for(BOX)
    data = 100.0 + torch.randn(1, 500, 3, generator=torch.Generator().manual_seed(1))
    agent.learn_moments(data)

    action = agent.act_batch(np.full((1, 3), 100.0), deterministic=True)

    assert action == pytest.approx(plain.act_batch(np.zeros((1, 3)), deterministic=True), abs=2e-3)


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
    for space in (DISCRETE, BOX, spaces.MultiDiscrete([2, 5]), spaces.MultiBinary(3)):
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


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_split_of_a_batch_changes_no_draw(by_hand: bool) -> None:
    agent = agent_for(DISCRETE, by_hand=by_hand)
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    noise = agent.draw_noise(1, 8, torch.Generator().manual_seed(2))[0]

    whole = agent.sample_batch(seen(obs), noise).action.tolist()
    halves = [agent.sample_batch(seen(obs[half]), noise[half]) for half in (slice(4), slice(4, 8))]

    assert [a for half in halves for a in half.action.tolist()] == whole


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loaded_agent_goes_on_as_the_saved_one(by_hand: bool) -> None:
    saved, loaded = (agent_for(DISCRETE, seed=s, by_hand=by_hand) for s in (1, 2))
    batch = minibatch(saved)
    saved.update(batch, RATES)
    loaded.load_state_dict(saved.state_dict())

    for agent in (saved, loaded):
        agent.update(batch, RATES)

    obs = np.ones((50, 3), dtype=np.float32)
    assert saved.act_batch(obs).tolist() == loaded.act_batch(obs).tolist()
    for ours, theirs in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_of_other_spaces_is_refused_by_their_names() -> None:
    state = agent_for(DISCRETE).state_dict()

    with pytest.raises(ValueError, match=r"action_space was \{.*'n': 4.*, and is \{.*'n': 5"):
        agent_for(spaces.Discrete(5)).load_state_dict(state)


def test_a_minibatch_of_one_stays_finite() -> None:
    agent = agent_for(DISCRETE)

    result = agent.update(minibatch(agent, size=1), RATES)

    assert torch.isfinite(result.metrics).all()
    assert result.finite


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("field", ["advantage", "value_target", "log_prob"])
def test_a_minibatch_with_a_nan_changes_no_weight(field: str, by_hand: bool) -> None:
    agent = agent_for(DISCRETE, by_hand=by_hand)
    batch = minibatch(agent)
    getattr(batch, field)[5] = torch.nan
    before = agent.adam.values.clone()

    result = agent.update(batch, RATES)

    assert not result.finite
    assert torch.equal(agent.adam.values, before)


MASKED_OBS = spaces.Dict({"observation": OBS, "action_mask": spaces.MultiBinary(4)})


def masked_agent(network: Callable[..., nn.Module] = MLP, **options: Any) -> PPOAgent:
    return PPOAgent(MASKED_OBS, DISCRETE, network, PPOConfig(**options), device=CPU, seed=1)


def test_a_mask_in_the_observation_is_found_heeded_and_not_shown() -> None:
    agent = masked_agent()
    mask = np.array([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=np.int8)
    obs = {"observation": np.zeros((2, 3)), "action_mask": mask}

    for deterministic in (True, False):
        assert agent.act_batch(obs, deterministic).tolist() == [2, 0]
    assert list(agent.model.preprocess.space) == ["observation"]  # type: ignore[call-overload]
    assert not masked_agent(action_mask="none").is_masked


def test_a_mask_in_the_infos_may_come_in_parts() -> None:
    agent = agent_for(spaces.MultiDiscrete([2, 3]), action_mask="info")
    parts = np.empty(1, dtype=object)
    parts[0] = (np.array([0, 1]), np.array([0, 1, 0]))

    mask = agent.mask_of({"action_mask": parts})

    assert mask is not None
    assert mask.tolist() == [[False, True, False, True, False]]
    assert agent.act_batch(np.zeros((1, 3)), action_mask=mask).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1, 0, 0], [0, 0, 0, 0]], "mask of env 1 allows no action"),
        ([[1, 1], [1, 1]], r"must hold 4 numbers, got shape \(2,\)"),
    ],
)
def test_a_mask_that_makes_no_sense_is_named(mask: Any, words: str) -> None:
    agent = agent_for(DISCRETE, action_mask="info")

    with pytest.raises(MaskError, match=words):
        agent.mask_in({}, {"action_mask": np.array(mask)})


def test_a_choice_among_several_without_any_left_is_named() -> None:
    agent = agent_for(spaces.MultiDiscrete([2, 2]), action_mask="info")

    with pytest.raises(MaskError, match="mask of env 0 allows no action"):
        agent.mask_in({}, {"action_mask": np.array([[1, 1, 0, 0]])})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: agent_for(BOX, action_mask="info"), ActionSpaceError, "cannot be masked"),
        (lambda: masked_agent(action_mask="x"), MaskError, "x is no key of the observation; its"),
        (lambda: masked_agent(action_mask="observation"), MaskError, r"shape \(3,\), the actions"),
        (lambda: agent_for(DISCRETE, action_mask="x"), MaskError, "it is no Dict"),
    ],
)
def test_a_mask_that_cannot_be_had_is_refused_at_once(
    make: Callable[[], PPOAgent], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_the_infos_must_bring_the_mask_that_was_promised() -> None:
    agent = agent_for(DISCRETE, action_mask="info")

    with pytest.raises(MaskError, match="infos hold no action_mask"):
        agent.mask_in({}, {})


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_mask_memory_and_dict_observations_go_together(shared_trunk: bool) -> None:
    agent = masked_agent(partial(Recurrent, size=5), shared_trunk=shared_trunk)
    memory = agent.new_memory(2)
    mask = np.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=np.int8)
    obs = {"observation": np.ones((2, 3)), "action_mask": mask}

    assert memory is not None
    before = memory.clone()
    actions = [agent.act_batch(obs, memory=memory).tolist() for _ in range(20)]

    assert memory.shape == (2, 10 if shared_trunk else 20)
    assert not torch.equal(memory, before)
    assert {first for first, _ in actions} <= {1, 2}
    assert {second for _, second in actions} <= {0, 3}
    with pytest.raises(ValueError, match="this policy has a memory"):
        agent.act_batch(obs)


def test_an_observation_space_that_ppo_cannot_read_is_named() -> None:
    with pytest.raises(ObservationSpaceError, match=r"space Text.* is not supported"):
        PPOAgent(spaces.Text(3), DISCRETE, MLP, PPOConfig(), device=CPU, seed=1)


def test_a_network_without_out_features_is_told_what_is_missing() -> None:
    with pytest.raises(UserError, match="network Flatten has no out_features"):
        PPOAgent(OBS, DISCRETE, lambda _: nn.Flatten(), PPOConfig(), device=CPU, seed=1)


def test_images_and_vectors_are_learned_from_together() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (9, 9, 3), np.uint8), "arm": OBS})
    cnn = {"channels": [4], "kernels": [3], "strides": [2], "hidden_size": 8}
    network = partial(DictNetwork, hidden_sizes=[8], cnn=cnn)
    agent = PPOAgent(space, DISCRETE, network, PPOConfig(), device=CPU, seed=1)
    space.seed(1)
    leaves = agent.reader.read(
        {name: np.stack([part.sample() for _ in range(16)]) for name, part in space.items()}
    )
    inputs = agent.inputs(leaves)
    action = torch.zeros(16, dtype=torch.int64)
    scores = agent.score_batch(inputs, action)
    batch = Minibatch(inputs, action, *scores, torch.randn(16), torch.randn(16))

    agent.update(batch, RATES)

    for name in ("actor.cnns.0.layers.0.weight", "actor.mlp.layers.0.weight"):
        assert agent.adam.views[name][1].abs().max() > 0, name


def test_a_users_dropout_is_off_but_for_the_gradient() -> None:
    def network(space: spaces.Space[Any]) -> nn.Module:
        mlp = MLP(space)
        mlp.layers.append(nn.Dropout(0.5))
        return mlp

    agent = PPOAgent(OBS, BOX, network, PPOConfig(), device=CPU, seed=1, by_hand=False)
    obs = np.ones((4, 3), dtype=np.float32)
    batch = minibatch(agent)

    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()
    first, second = (agent.update(batch, RATES).metrics[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert agent.act_batch(obs, True).tolist() == agent.act_batch(obs, True).tolist()


def test_a_policy_that_was_trained_with_masks_does_not_play_without_them() -> None:
    agent = agent_for(DISCRETE, action_mask="info")

    with pytest.raises(MaskError, match="this policy wants masks"):
        agent.act_batch(np.zeros((1, 3)))
    with pytest.raises(MaskError, match="infos of env 1 hold no action_mask"):
        agent.mask_of({"action_mask": np.ones((2, 4)), "_action_mask": np.array([True, False])})


@pytest.mark.parametrize("by_hand", [True, False])
def test_nothing_is_clipped_before_a_moment_is_known(by_hand: bool) -> None:
    agent = agent_for(BOX, by_hand=by_hand, normalize_obs=True, clip_obs=1.0)
    plain = agent_for(BOX, by_hand=by_hand)
    obs = np.array([[5.0, -30.0, 0.5]], dtype=np.float32)

    assert agent.act_batch(obs, True) == pytest.approx(plain.act_batch(obs, True), abs=1e-6)
