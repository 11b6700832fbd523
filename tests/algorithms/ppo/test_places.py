"""The places for ideas: each takes effect on host envs and tensor envs, survives a resume, and is
refused in one line if it is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small, small_auto
from gymnasium import spaces
from own_ideas import Counting
from small_agents import agent_for, minibatch

from ml_pipeline import load
from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.ppo.ideas.rnd import RND
from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.algorithms.ppo.rollout import Rollout
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.assembly.run import train
from ml_pipeline.errors import UserError
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.optimiser import FlatAdam, TorchOptimiser
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.training import returns
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.returns import RolloutOutcome

OBS = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)
IDEAS = "ml_pipeline.algorithms.ppo.ideas"
WHERE = {"host": ["env=cartpole"], "tensors": ["env=torch_cartpole", "vec_env=auto"]}
PLACES = {
    "loss": ["agent.loss._target_=own_ideas.with_metrics"],
    "loss, class": ["agent.loss._target_=own_ideas.Teacher", "agent.loss.coef=0.5"],
    "optimiser": ["agent.optimizer._target_=torch.optim.AdamW", "agent.optimizer.weight_decay=1"],
    "optimiser in groups": ["agent.optimizer._target_=own_ideas.two_speeds"],
    "advantage": ["agent.advantage._target_=own_ideas.one_step"],
    "advantage and target": ["agent.advantage._target_=own_ideas.with_own_target"],
    "recomputed advantages": ["agent.recompute_advantages=true"],
    "schedule": ["agent.learning_rate_schedule=own_ideas.halved"],
    "rollout, function": ["agent.on_rollout._target_=own_ideas.double_reward"],
    "rollout, class": ["agent.on_rollout._target_=own_ideas.Counting"],
    "rollout, replaced reward": ["agent.on_rollout._target_=own_ideas.replace_reward"],
    "critic": ["network.critic.hidden_sizes=[32]"],
    "layer norm": ["network=mlp", "network.layer_norm=true"],
    "rpo": [f"agent.loss._target_={IDEAS}.rpo.rpo_loss", "agent.loss.alpha=0.3"],
    "muon": [f"agent.optimizer._target_={IDEAS}.muon.Muon"],
    "rnd": [f"agent.on_rollout._target_={IDEAS}.rnd.RND"],
    "symmetry": [
        f"agent.loss._target_={IDEAS}.symmetry.symmetric_loss",
        *("agent.loss.mirror_obs=own_ideas.mirror_cartpole",),
        *("agent.loss.mirror_action=own_ideas.swap_sides",),
    ],
}
NEEDS_TORCH_2_9 = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon needs torch 2.9"
)
EACH = [pytest.param(name, marks=NEEDS_TORCH_2_9 if name == "muon" else ()) for name in PLACES]


def rows_of(*words: str) -> list[dict[str, str]]:
    run = train(list(words)).run_dir
    # What a run measures of itself differs from run to run.
    rows = read_metrics(run / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@cache
def losses_without_ideas(where: str) -> list[str]:
    return [row["loss/value"] for row in rows_of(*small_auto(), *WHERE[where])]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", EACH)
def test_idea_takes_effect_and_a_resumed_run_goes_on_with_it(
    place: str, where: str, here: Path
) -> None:
    plain = losses_without_ideas(where)

    run = train([*small_auto(), *WHERE[where], *PLACES[place]]).run_dir
    rows = rows_of(f"resume={run}", "total_steps=128")

    losses = [row["loss/value"] for row in rows]
    assert losses[: len(plain)] != plain
    assert len(losses) > len(plain)
    assert np.isfinite([float(each) for each in losses]).all()


@pytest.mark.parametrize("place", ["rollout, class", "optimiser", "recomputed advantages", "rnd"])
def test_a_run_with_an_idea_continues_bit_for_bit(place: str, here: Path) -> None:
    idea = [*small(), "agent.learning_rate_schedule=constant", *PLACES[place]]

    whole = rows_of(*idea, "total_steps=128")
    half = train([*idea, "total_steps=64"]).run_dir
    resumed = rows_of(f"resume={half}", "total_steps=128")

    names = ("loss/policy", "loss/value", "loss/grad_norm", "policy/entropy")
    assert [[row[n] for n in names] for row in resumed] == [
        [row[n] for n in names] for row in whole
    ]


def test_extra_metrics_of_a_loss_and_of_a_hook_are_logged(here: Path) -> None:
    rows = rows_of(
        *small(), *PLACES["loss"], *PLACES["rollout, function"], "agent.on_rollout.factor=3"
    )

    assert all(float(row["my/features"]) > 0 and float(row["my/outputs"]) > 0 for row in rows)
    assert [float(row["my/steps"]) for row in rows] == [16.0, 16.0]


def test_extra_metrics_are_means_over_the_gradient_steps() -> None:
    agent = agent_for(OBS, TWO, loss={"_target_": "own_ideas.with_metrics"})
    batch = minibatch(agent)

    table = agent.epoch(batch, torch.arange(32).view(2, 16), RATES)

    assert agent.extra_metrics == ("my/features", "my/outputs")
    assert table.shape == (2, 2 + 7)
    assert (table[:, -1] == 1).all()  # finite
    assert (table[:, 0] > 0).all()


def test_a_loss_of_the_old_form_is_told_the_new_one() -> None:
    with pytest.raises(UserError, match=r"a loss now takes \(now, batch, rates, config\)"):
        agent_for(OBS, TWO, loss={"_target_": "own_ideas.of_old_form"})


def test_noise_of_a_loss_is_new_in_each_step_and_the_same_in_a_second_run() -> None:
    entry = {"_target_": f"{IDEAS}.rpo.rpo_loss", "alpha": 0.5}
    agents = [agent_for(OBS, spaces.Box(-1, 1, (2,)), loss=entry) for _ in range(2)]
    batch = minibatch(agents[0])
    still = RATES._replace(learning_rate=0.0)

    ours, theirs = ([each.update(batch, still).policy_loss for _ in range(2)] for each in agents)

    assert ours == theirs
    assert ours[0] != ours[1]


def test_rpo_shifts_means_by_at_most_alpha() -> None:
    agent = agent_for(OBS, spaces.Box(-1, 1, (2,)))
    batch, key = minibatch(agent), torch.tensor(5)
    from ml_pipeline import counter_random
    from ml_pipeline.algorithms.ppo.loss import current

    now = current(agent.model, agent.plain.passed, batch, key)
    noise = 2.0 * counter_random.rand(key, now.outputs.shape) - 1.0
    shifted = now.with_outputs(now.outputs + 0.5 * noise, batch.action)

    assert noise.abs().max() <= 1.0
    normal = torch.distributions.Normal(shifted.outputs, agent.distribution.log_std.exp())
    expected = normal.log_prob(batch.action).sum(-1)
    torch.testing.assert_close(shifted.log_prob, expected)


def rollout_for_rnd(seed: int, *, shift: float = 0.0) -> Rollout:
    """32 steps of 8 envs; in the last 4 of them, the observations are elsewhere."""
    obs = np.random.default_rng(seed).normal(size=(33, 8, 3)).astype(np.float32)
    obs[:, 4:] += shift
    reward, never = np.zeros((32, 8), np.float32), np.zeros((32, 8), bool)
    return Rollout({"": obs}, np.zeros((32, 8), np.int64), reward, never, never)


def test_rnd_pays_for_new_observations_long_after_the_first_rollouts() -> None:
    rnd = RND(agent_for(OBS, TWO, gae_lambda=0.0), RunContext.alone(), gamma=0.0)

    bonuses = [rnd(rollout_for_rnd(seed))["rnd/bonus"] for seed in range(20)]
    last = rollout_for_rnd(20, shift=4.0)
    rnd(last)

    assert bonuses[-1] > 0.1 * bonuses[0]
    assert last.reward[:, 4:].mean() > 1.0 > last.reward[:, :4].mean()


def test_bonuses_of_rnd_do_not_end_with_an_episode() -> None:
    agent = agent_for(OBS, TWO)
    plain = rollout_for_rnd(1)
    ending = replace(plain, reward=plain.reward.copy(), terminated=plain.terminated.copy())
    ending.terminated[10, ::2] = True
    discounts = {"gamma": agent.config.gamma, "lam": agent.config.gae_lambda}

    advantages = []
    for rollout in (plain, ending):
        RND(agent, RunContext.alone())(rollout)
        ends = (~rollout.terminated).astype(np.float32)
        advantages.append(returns.gae(rollout.reward, 0.0, 0.0, ends, **discounts))

    assert (plain.reward != ending.reward).any()
    np.testing.assert_allclose(*advantages, rtol=1e-4, atol=1e-5)


def test_symmetric_loss_is_the_same_for_a_minibatch_and_its_image() -> None:
    entry = {
        "_target_": f"{IDEAS}.symmetry.symmetric_loss",
        "mirror_obs": "own_ideas.mirror_cartpole",
        "mirror_action": "own_ideas.swap_sides",
    }
    agent = agent_for(OBS, TWO, loss=entry)
    batch = minibatch(agent)
    image = batch._replace(
        inputs=batch.inputs._replace(obs=-batch.inputs.obs), action=1 - batch.action
    )
    still = RATES._replace(learning_rate=0.0)

    one, other = (agent.update(each, still) for each in (batch, image))

    assert one.policy_loss == pytest.approx(other.policy_loss.item(), abs=1e-6)
    assert one.value_loss == pytest.approx(other.value_loss.item(), abs=1e-6)


def test_gae_is_the_default_and_another_estimate_gets_true_successors() -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    ends = np.zeros((3, 2), bool)
    ends[1, 0] = True
    outcome = RolloutOutcome(
        numbers, numbers, numbers[0], numbers + 10, ends, ~ends & (numbers > 4)
    )
    from own_ideas import one_step, with_own_target

    advantage, target = outcome.estimate(one_step, gamma=0.5, lam=0.9)
    _, own_target = outcome.estimate(with_own_target, gamma=0.5, lam=0.9)

    following = np.array([[2, 3], [0, 5], [0, 15]])  # then terminated, then cut at (2, 1)
    assert advantage == pytest.approx(0.5 * following)
    assert target == pytest.approx(advantage + numbers)
    assert own_target == pytest.approx(numbers + 0.5 * following)
    assert outcome.estimate(returns.gae, gamma=0.5, lam=0.0)[0] == pytest.approx(advantage)


def test_torchs_adam_as_an_optimiser_of_the_config_equals_flat_adam() -> None:
    own = {"_target_": "torch.optim.Adam", "eps": 1e-5}
    agents = [agent_for(OBS, TWO), agent_for(OBS, TWO, optimizer=own)]
    assert [type(each.adam) for each in agents] == [FlatAdam, TorchOptimiser]
    assert [type(each.backend).__name__ for each in agents] == ["NumpyPPO", "NumpyPPO"]
    batch = minibatch(agents[0])

    for agent in agents:
        for _ in range(3):
            agent.update(batch, RATES)

    torch.testing.assert_close(agents[0].adam.values, agents[1].adam.values)


def test_groups_of_an_optimiser_keep_the_ratio_of_their_rates() -> None:
    agent = agent_for(OBS, TWO, optimizer={"_target_": "own_ideas.two_speeds"})
    before = {name: values.clone() for name, (values, _) in agent.adam.views.items()}

    agent.update(minibatch(agent), RATES)

    moved = {name: values - before[name] for name, (values, _) in agent.adam.views.items()}
    for name, (_, grad) in agent.adam.views.items():
        rate = 1e-3 if "head" in name else 1e-2
        torch.testing.assert_close(moved[name], -rate * grad, atol=1e-7, rtol=1e-3)


def test_weight_decay_and_clipping_reach_a_named_optimiser() -> None:
    entry = {"_target_": "torch.optim.SGD"}
    agent = agent_for(OBS, TWO, optimizer=entry, max_grad_norm=0.01)
    before = agent.adam.values.clone()

    agent.update(minibatch(agent), RATES)

    assert (agent.adam.values - before).norm().item() == pytest.approx(1e-2 * 0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": {"_target_": "torch.optim.AdamX"}}, "did you mean Adam"),
        ({"optimizer": {"_target_": "torch.optim.AdamW", "decay": 1}}, "agent.optimizer.decay is"),
        ({"optimizer": {"_target_": "torch.optim.AdamW", "betas": 1}}, "agent.optimizer._target_="),
        ({"optimizer": {"_target_": "own_ideas.halved"}}, "agent.optimizer"),
        ({"optimizer": {"_target_": "torch.optim.LBFGS"}}, "LBFGS: its step needs a closure"),
    ],
)
def test_wrong_optimiser_is_one_line(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as it:
        agent_for(OBS, TWO, **options)

    assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("agent.learning_rate_schedule=linaer", "must be constant | linear | cosine | adaptive"),
        ("agent.learning_rate_schedule=own_ideas.negative", "return a factor of at least 0"),
        ("agent.learning_rate_schedule=own_ideas.absent", "has no 'absent'"),
        (
            "agent.advantage._target_=own_ideas.halved",
            "agent.advantage.gamma is unknown; halved takes",
        ),
        (
            "agent.advantage._target_=own_ideas.sum_over_time",
            "own_ideas.sum_over_time: returned shapes ((3,), ",
        ),
        (
            "agent.advantage._target_=own_ideas.broken_estimate",
            "own_ideas.broken_estimate: raised AttributeError",
        ),
        (
            "agent.loss=my_losses.mine",
            "must have a _target_; write agent.loss._target_=my_losses.mine",
        ),
        ("network.layer_norm=true", "write network=mlp network.layer_norm=true"),
        ("network.critic=lstm", "network.critic=lstm: must have keys; write network.critic.hidden"),
        ("agent.optimizer=adamw", "write agent.optimizer._target_=torch.optim.AdamW"),
        ("agent.on_rollout._target_=own_ideas.halve", "did you mean halved"),
        ("agent.obs_groups.actor=[x]", "the observation is no Dict"),
        ("agent.loss.beta=1", "agent.loss.beta is unknown"),
        ("network.critic.size=1", "network.*size.* is unknown"),
        ("agent=dqn network.critic.hidden_sizes=[1]", "dqn has no critic network"),
        (
            "agent.shared_trunk=true network.critic.hidden_sizes=[8]",
            "agent.shared_trunk=true has none",
        ),
    ],
)
def test_wrong_place_is_one_line_before_the_run(word: str, message: str, here: Path) -> None:
    with pytest.raises((UserError, ConfigError, ValueError)) as it:
        train([*word.split(), "total_steps=64", "n_envs=2", "logger=none"])

    assert all(part in str(it.value) for part in message.split(".*")), str(it.value)
    assert "\n" not in str(it.value)
    assert not list(here.glob("runs/*/*/metrics.csv"))


def test_only_the_rewards_of_a_rollout_can_be_replaced(here: Path) -> None:
    with pytest.raises(UserError, match="only rollout"):
        train([*small(), "agent.on_rollout._target_=own_ideas.replace_action"])


def test_state_of_a_rollout_class_is_in_the_checkpoint(here: Path) -> None:
    run = train([*small(), *PLACES["rollout, class"]]).run_dir

    state = torch.load(run / "checkpoints" / "latest.pt", weights_only=True)
    text = json.dumps(state["on_rollout"])

    assert text == json.dumps({"n_rollouts": 2})
    assert Counting.__name__ in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    "networks",
    [
        ["network=lstm", f"network.critic._target_={MLP.__module__}.MLP"],
        ["network=mlp", "network.critic._target_=ml_pipeline.policy.recurrent.Recurrent"],
    ],
    ids=["actor", "critic"],
)
def test_one_of_both_networks_may_be_recurrent(networks: list[str], here: Path) -> None:
    run = train([*small(), *networks]).run_dir

    rows = rows_of(f"resume={run}", "total_steps=128")
    policy = load(run)

    assert len(rows) == 4
    assert policy.predict(np.zeros(4, np.float32)) in (0, 1)
    assert main(["export", str(run)]) == 0
    assert (run / "policy.pt2").exists()


GROUPS = ["env.id=null", "env.target=own_ideas.TwoSights", "agent.fast=auto"]


def test_actor_reads_its_keys_only_in_predict_and_the_critic_more(here: Path) -> None:
    run = train([*small(), *GROUPS, "agent.obs_groups.actor=[seen]"]).run_dir
    policy = load(run)

    action = policy.predict({"seen": np.zeros(2, np.float32)})
    both = policy.predict({"seen": np.zeros(2, np.float32), "hidden": np.ones(1, np.float32)})

    assert action == both
    assert list(policy.observation_space.spaces) == ["seen"]  # type: ignore[attr-defined]
    sizes = {
        name: tuple(values.shape)
        for name, (values, _) in policy.policy.adam.views.items()  # type: ignore[attr-defined]
    }
    assert sizes["actor.layers.0.weight"] == (64, 2)
    assert sizes["critic.layers.0.weight"] == (64, 3)


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_what_only_the_critic_reads_never_reaches_an_action(network: str, here: Path) -> None:
    words = [*small(), *GROUPS, "agent.obs_groups.actor=[seen]", f"network={network}"]
    run = train([*words, "agent.normalize_obs=true"]).run_dir
    agent: Any = load(run).policy
    seen = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    memories = [agent.new_memory(4) for _ in range(2)]

    actions = [
        agent.act_batch(
            {"seen": seen, "hidden": np.full((4, 1), value, np.float32)}, True, memory=m
        )
        for value, m in zip((0.0, 1e3), memories, strict=True)
    ]

    assert (actions[0] == actions[1]).all()
