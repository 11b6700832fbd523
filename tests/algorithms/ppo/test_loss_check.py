"""check_loss: a wrong loss of the user is refused in one line, before a run folder exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from gymnasium import spaces
from small_agents import agent_for

from ml_pipeline.algorithms.ppo.loss import Current, LossTerms, Minibatch, ppo_loss
from ml_pipeline.algorithms.ppo.loss_check import LossError, check_loss
from ml_pipeline.assembly.run import train
from ml_pipeline.policy.image_networks import DictNetwork
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.training.checks import TrainingError

FOUR = spaces.Discrete(4)
OBS = spaces.Box(-1, 1, (3,), np.float32)
NESTED = spaces.Dict({"action_mask": spaces.MultiBinary(4), "seen": OBS})


def nothing(*given: Any) -> None: ...


def three_terms(*given: Any) -> Any:
    return tuple(ppo_loss(*given))[:3]


def without_the_mean(*given: Any) -> LossTerms:
    return ppo_loss(*given)._replace(total=given[0].log_prob)


def number(*given: Any) -> LossTerms:
    return ppo_loss(*given)._replace(entropy=0.5)  # type: ignore[arg-type]  # the mistake


def extra_number(*given: Any) -> LossTerms:
    return ppo_loss(*given)._replace(extra={"my/metric": 0.5})  # type: ignore[dict-item]


def taken_name(*given: Any) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(extra={"loss/policy": terms.policy})


def detached(*given: Any) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(total=terms.total.detach())


def raising(*given: Any) -> LossTerms:
    raise KeyError("old_log_prob")


def not_a_number(*given: Any) -> LossTerms:
    terms = ppo_loss(*given)
    return terms._replace(total=terms.total * torch.nan)


def entry(loss: Any) -> dict[str, str]:
    return {"_target_": f"{__name__}.{loss.__name__}"}


@pytest.mark.parametrize(
    ("loss", "fact"),
    [
        (nothing, "returned a NoneType;"),
        (three_terms, "returned a tuple of 3;"),
        (without_the_mean, r"returned a tensor of shape \(4,\) as total;"),
        (number, "returned a float as entropy;"),
        (extra_number, "returned a float as my/metric;"),
        (taken_name, "returned an extra metric 'loss/policy', a name that PPO uses;"),
        (detached, "returned a total without a gradient"),
        (raising, r"raised KeyError: 'old_log_prob' \(test_loss_check.py:\d+ in raising\)$"),
    ],
)
def test_wrong_loss_is_refused_in_one_line(loss: Any, fact: str) -> None:
    agent = agent_for(OBS, FOUR, loss=entry(loss))

    with pytest.raises(LossError, match=rf"^agent.loss._target_=.*\.{loss.__name__}: {fact}") as it:
        check_loss(agent)

    wanted = "return LossTerms(total, policy, value, entropy), four scalar tensors"
    assert loss is raising or str(it.value).endswith(wanted)


shapes: list[dict[str, Any]] = []


def watched(now: Current, batch: Minibatch, *given: Any) -> LossTerms:
    inputs = batch.inputs
    shapes.append(
        {"value": now.value.shape, "action": batch.action.shape, "mask": inputs.action_mask}
    )
    return ppo_loss(now, batch, *given)


@pytest.mark.parametrize(
    ("obs", "action", "network", "options", "expected"),
    [
        (OBS, spaces.Box(-1, 1, (2,)), MLP, {"box_policy": "gsde"}, ((4,), (4, 2))),
        (OBS, FOUR, Recurrent, {}, ((1, 4), (1, 4))),
        (NESTED, FOUR, DictNetwork, {}, ((4,), (4,))),
        (OBS, FOUR, MLP, {"action_mask": "info"}, ((4,), (4,))),
    ],
)
def test_loss_gets_transitions_of_every_kind_and_nothing_changes(
    obs: Any, action: Any, network: Any, options: dict[str, Any], expected: Any
) -> None:
    agent = agent_for(obs, action, network, loss=entry(watched), **options)
    before = [each.clone() for each in (agent.adam.values, agent.adam.grad)]
    drawn = agent.state_dict()["act_generator"]
    shapes.clear()

    check_loss(agent)

    (seen,) = shapes
    assert (seen["value"], seen["action"]) == expected
    assert (seen["mask"] is not None) == agent.masks.are_used
    assert all(map(torch.equal, before, (agent.adam.values, agent.adam.grad)))
    assert torch.equal(agent.state_dict()["act_generator"], drawn)


def test_run_with_a_wrong_loss_leaves_no_folder(here: Path) -> None:
    with pytest.raises(LossError, match="returned a NoneType"):
        train([*small(), f"agent.loss._target_={__name__}.nothing"])

    assert list(here.iterdir()) == []


def test_loss_that_gives_nan_is_named(here: Path) -> None:
    target = f"agent.loss._target_={__name__}.not_a_number"

    with pytest.raises(TrainingError, match=f"Look at {target} first"):
        train([*small(), "vec_env=serial", target])
