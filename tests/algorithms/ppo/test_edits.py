"""An edit, a patch or a subclass of the readable code takes effect: fast backends step aside."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from differences import BOX, CASES, FIVE, MASKED_CASES, Pair
from fingerprints import recorded
from gymnasium import spaces
from small_agents import CPU, agent_for, minibatch
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo import loss as losses
from ml_pipeline.algorithms.ppo.agent import PPOAgent, TorchPPO
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import LossTerms, Minibatch, Rates, UpdateResult, ppo_loss
from ml_pipeline.mirrors import fingerprint
from ml_pipeline.policy import distributions, networks, optimiser, recurrent
from ml_pipeline.policy.actor_critic import ActorCritic
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.distributions import Categorical, DiagonalGaussian
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.observations import Preprocess, RunningMoments
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.targets import TargetError
from ml_pipeline.training.contracts import RunContext

OBS = spaces.Box(-1, 1, (3,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)


@pytest.mark.parametrize(("file", "path"), recorded(), ids=lambda each: str(each).split("/")[-1])
def test_recorded_fingerprint_is_that_of_the_code(file: Any, path: str) -> None:
    message = (
        f"{path} has changed. Make the same change in {file.name} (or narrow what it covers), run "
        "tests/contracts/test_backends.py, then: python tests/fingerprints.py"
    )

    assert recorded()[file, path] == fingerprint(path), message


def unchanged(function: Any) -> Any:
    """A wrapper as a user writes one to log or count calls."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return wrapper


PATCHED = [
    (losses, "ppo_loss"),
    (losses, "normalised"),
    (losses, "policy_change"),
    (TorchPPO, "update"),
    (TorchPPO, "sample"),
    (TorchPPO, "score"),
    (TorchPPO, "value"),
    (PPOAgent, "epoch"),
    (PPOAgent, "update"),
    (ActorCritic, "forward"),
    (ActorCritic, "policy"),
    (MLP, "__init__"),
    (MLP, "forward"),
    (Preprocess, "forward"),
    (RunningMoments, "normalised"),
    (Categorical, "sample"),
    (Categorical, "log_prob_and_entropy"),
    (DiagonalGaussian, "sample"),
    (DiagonalGaussian, "log_prob_and_entropy"),
    (distributions, "_drawn"),
    (optimiser, "adam_step"),
    (FlatAdam, "step"),
]


@pytest.mark.parametrize(
    ("owner", "name"), PATCHED, ids=lambda each: getattr(each, "__name__", each)
)
def test_patched_function_is_noticed_even_if_it_computes_the_same(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_for(OBS, BOX if owner is DiagonalGaussian else FIVE)
    monkeypatch.setattr(owner, name, unchanged(getattr(owner, name)))

    remark = agent.check_fast()

    assert remark.startswith("plain torch runs instead of NumpyPPO: ")
    assert name in remark
    assert agent.fast is None


@pytest.mark.parametrize(
    ("owner", "name", "value", "action_space"),
    [
        (optimiser, "BETA_1", 0.8, FIVE),
        (distributions, "LOG_SQRT_2PI", 1.0, BOX),
        (distributions, "FORBIDDEN", -1.0, FIVE),
        (networks, "_ACTIVATIONS", {**networks._ACTIVATIONS, "tanh": nn.Softsign}, FIVE),
    ],
)
def test_patched_constant_is_noticed(
    owner: Any, name: str, value: Any, action_space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_for(OBS, action_space)
    monkeypatch.setattr(owner, name, value)

    assert agent.check_fast() == f"plain torch runs instead of NumpyPPO: {name} was edited"


@pytest.mark.parametrize(
    ("owner", "name", "action_space"),
    [
        (recurrent.Recurrent, "forward", FIVE),
        (recurrent.Recurrent, "_run", BOX),
        (distributions.DiagonalGaussian, "sample", FIVE),
        (distributions.Categorical, "log_prob_and_entropy", BOX),
        (distributions, "LOG_SQRT_2PI", FIVE),
        (distributions, "FORBIDDEN", BOX),
    ],
)
def test_edit_of_code_that_the_run_does_not_use_changes_nothing(
    owner: Any, name: str, action_space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_for(OBS, action_space)
    monkeypatch.setattr(owner, name, lambda *given: 1 / 0)

    assert agent.check_fast() == ""
    assert agent.fast is not None
    agent.update(minibatch(agent), RATES)  # it really is not used


def huber(given: Any, terms: LossTerms) -> LossTerms:
    """A value loss that differs only for errors above 10."""
    now, batch, _, config = given
    loss = nn.functional.huber_loss(now.value, batch.value_target, delta=10.0)
    return terms._replace(total=terms.total + config.value_coef * (loss - terms.value), value=loss)


@pytest.mark.parametrize("action_space", [FIVE, BOX])
def test_edit_that_acts_on_large_numbers_only_is_used(
    action_space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = losses.ppo_loss
    agent, plain = agent_for(OBS, action_space), agent_for(OBS, action_space, fast=False)
    for each in (agent, plain):
        monkeypatch.setattr(each.plain, "loss", lambda *given: huber(given, original(*given)))

    remark = agent.check_fast()

    assert remark == "plain torch runs instead of NumpyPPO: the loss was replaced"
    batch, order = minibatch(agent), torch.arange(32).view(2, 16)
    tables = [each.epoch(batch, order, RATES) for each in (agent, plain)]
    assert torch.equal(*tables)


def test_changed_layer_or_hook_of_the_network_is_noticed() -> None:
    agents = [agent_for(OBS, FIVE) for _ in range(3)]
    agents[0].model.actor.layers[1] = nn.GELU()  # type: ignore[index,operator]
    agents[1].model.critic.layers[0].register_forward_hook(  # type: ignore[index,union-attr]
        lambda module, inputs, output: 2.0 * output
    )
    agents[2].model.actor.forward = lambda obs: obs  # type: ignore[method-assign]

    remarks = [each.check_fast().partition(": ")[2] for each in agents]

    assert remarks == ["the network has changed"] * 2 + ["MLP has its own forward"]


def test_network_that_numpy_does_not_repeat_runs_in_plain_torch() -> None:
    class Louder(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 10.0 * super().forward(input)

    class NoBias(MLP):
        def __init__(self, observation_space: Any) -> None:
            super().__init__(observation_space)
            self.layers[0].bias = None  # type: ignore[assignment,index]

    agents = [agent_for(OBS, FIVE) for _ in range(3)]
    agents[0].model.policy_head = Louder(64, 5)
    agents[1].model.value_head = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 1))  # type: ignore[assignment]
    agents[2].model.actor.layers[0].requires_grad_(False)  # type: ignore[index,operator]

    remarks = [each.check_fast().partition(": ")[2] for each in agents]

    assert remarks == ["the network has changed"] * 3
    assert agent_for(OBS, FIVE, NoBias).fast is None


def test_changed_clip_of_observations_is_used() -> None:
    agent = agent_for(OBS, FIVE, normalize_obs=True)
    assert agent.fast is not None
    agent.learn_moments(torch.randn(50, 1, 3))
    agent.model.preprocess.clip = 0.1
    inputs = agent.inputs({"": np.full((1, 3), 50.0, np.float32)})

    ours, theirs = (each.outputs(inputs)[0] for each in (agent.fast, agent.plain))

    torch.testing.assert_close(ours, theirs.detach())


def test_agent_that_is_made_after_a_patch_never_acts_with_fast_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, obs: 2.0 * forward(self, obs))

    agent = agent_for(OBS, FIVE)

    assert agent.fast is None
    assert "MLP.forward" in agent.check_fast()
    assert agent.check_fast() == ""  # reported once


def test_override_in_a_subclass_runs_and_other_methods_keep_the_fast_backend() -> None:
    class Counting(PPOAgent):
        n_updates = 0

        def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
            self.n_updates += 1
            return super().update(batch, rates._replace(learning_rate=0.0))

    class Named(PPOAgent):
        def for_playing(self) -> PPOAgent:
            return self

    agent, named = (
        kind(Spaces(OBS, FIVE), MLP, PPOConfig(), RunContext.alone()) for kind in (Counting, Named)
    )

    remark = agent.check_fast()
    agent.epoch(minibatch(agent), torch.arange(32).view(4, 8), RATES)

    assert remark == "plain torch runs instead of NumpyPPO: Counting has its own update"
    assert agent.n_updates == 4
    assert named.check_fast() == ""


def test_distribution_of_a_user_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharper(Categorical):
        def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
            return super().sample(2.0 * outputs, noise)

    monkeypatch.setattr(distributions, "Categorical", Sharper)

    assert agent_for(OBS, FIVE).fast is None


@pytest.mark.parametrize("case", [*CASES, *MASKED_CASES])
def test_check_accepts_unchanged_code_and_changes_nothing(case: str) -> None:
    agent = Pair({**CASES, **MASKED_CASES}[case], "numpy", CPU, "float32").fast
    adam = agent.adam
    kept = adam.values, adam.grad, *adam.moments, adam.n_steps, agent.state_dict()["act_generator"]
    before = [each.clone() for each in kept]

    remark = agent.check_fast()

    assert remark == ""
    assert agent.fast is not None
    after = [*kept[:-1], agent.state_dict()["act_generator"]]
    assert all(map(torch.equal, before, after))


def test_own_loss_gets_its_keyword_arguments_and_switches_the_fast_backend_off() -> None:
    target = f"{__name__}.weighted"
    agents = [agent_for(OBS, FIVE, loss={"_target_": target, "weight": w}) for w in (1.0, 3.0)]

    results = [each.update(minibatch(each), RATES) for each in agents]

    assert [each.fast for each in agents] == [None, None]
    assert results[1].grad_norm == pytest.approx(3.0 * results[0].grad_norm.item(), rel=1e-5)


def weighted(*given: Any, weight: float) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(total=weight * terms.total)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"_target_": f"{__name__}.weighted"}, "agent.loss: weighted cannot be called: missing"),
        ({"_target_": f"{__name__}.absent"}, "agent.loss._target_=.*: module .* has no 'absent'"),
        (
            {"_target_": "ml_pipeline.algorithms.ppo.loss.ppo_loss", "beta": 1},
            "agent.loss.beta is unknown",
        ),
        ({"beta": 1}, "agent.loss needs a _target_"),
    ],
)
def test_wrong_loss_entry_is_one_line(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        agent_for(OBS, FIVE, loss=loss)


def test_fast_off_uses_plain_torch() -> None:
    agent = agent_for(OBS, FIVE, fast=False)

    assert agent.fast is None
    assert agent.check_fast() == ""
