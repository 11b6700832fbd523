"""An edit of the plain torch code takes effect: the fast backends notice and step aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from differences import BOX, CASES, FIVE, MASKED_CASES, Pair
from gymnasium import spaces
from small_agents import CPU, agent_for, minibatch
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import LossTerms, ppo_loss
from ml_pipeline.algorithms.ppo.records import Minibatch, Rates, UpdateResult
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.targets import TargetError

OBS = spaces.Box(-1, 1, (3,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)


def half_the_value_loss(*given: Any) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(total=terms.total - 0.25 * terms.value)


def wider_clip(*given: Any) -> LossTerms:
    *others, rates, config = given
    return ppo_loss(*others, rates._replace(clip_range=1.5 * rates.clip_range), config)


def no_normalisation(*given: Any) -> LossTerms:
    return ppo_loss(*given[:-1], PPOConfig(normalize_advantage=False, entropy_coef=0.01))


def other_entropy(*given: Any) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(total=terms.total + 0.02 * terms.entropy)


@pytest.mark.parametrize(
    "edited", [half_the_value_loss, wider_clip, no_normalisation, other_entropy]
)
@pytest.mark.parametrize("action_space", [FIVE, BOX])
def test_edited_loss_is_noticed_and_used(
    edited: Callable[..., LossTerms], action_space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_for(OBS, action_space, entropy_coef=0.01)
    expected = agent_for(
        OBS, action_space, entropy_coef=0.01, loss={"_target_": f"{__name__}.{edited.__name__}"}
    )
    monkeypatch.setattr(agent.plain, "loss", edited)

    remark = agent.check_fast()

    assert remark.startswith("plain torch runs instead of NumpyPPO: ")
    assert "apart; agent.fast=off" in remark
    batch, order = minibatch(agent), torch.arange(32).view(2, 16)
    tables = [each.epoch(batch, order, RATES) for each in (agent, expected)]
    assert torch.equal(*tables)
    assert torch.equal(agent.adam.values, expected.adam.values)


def test_loss_that_raises_stops_the_run_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: Any) -> LossTerms:
        raise RuntimeError("my loss ran")

    agent = agent_for(OBS, FIVE)
    monkeypatch.setattr(agent.plain, "loss", broken)

    with pytest.raises(RuntimeError, match="my loss ran"):
        agent.check_fast()


def test_edited_network_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: 1.1 * forward(self, x))

    remark = agent_for(OBS, FIVE).check_fast()

    assert "the policy's outputs" in remark


def test_edited_sampling_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Categorical.sample
    monkeypatch.setattr(Categorical, "sample", lambda self, outputs, u: sample(self, outputs, u**2))

    remark = agent_for(OBS, FIVE).check_fast()

    assert "actions" in remark


def test_edited_optimiser_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FlatAdam.step

    def slower(self: FlatAdam, learning_rate: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        return step(self, 0.5 * learning_rate, loss)

    monkeypatch.setattr(FlatAdam, "step", slower)

    remark = agent_for(OBS, FIVE).check_fast()

    assert "the optimiser's step: 100" in remark


def test_update_overridden_in_a_subclass_runs() -> None:
    class Counting(PPOAgent):
        n_updates = 0

        def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
            self.n_updates += 1
            return super().update(batch, rates._replace(learning_rate=0.0))

    agent = Counting(OBS, FIVE, MLP, PPOConfig(), device=CPU, seed=1)
    remark, before = agent.check_fast(), agent.n_updates

    agent.epoch(minibatch(agent), torch.arange(32).view(4, 8), RATES)

    assert remark
    assert agent.n_updates == before + 4


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
