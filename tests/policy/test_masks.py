"""Action masks: read from observations or infos, respected, and refused if wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_agents import agent_for

from ml_pipeline.policy.distributions import ActionSpaceError
from ml_pipeline.policy.masks import MaskError
from ml_pipeline.policy.recurrent import Recurrent

OBS = spaces.Box(-1, 1, (3,), np.float32)
MASKED_OBS = spaces.Dict({"observation": OBS, "action_mask": spaces.MultiBinary(4)})
NESTED_MASK = spaces.Dict(action_mask=spaces.Dict(lane=spaces.MultiBinary(4)), seen=OBS)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


def test_a_mask_in_the_observation_is_used_and_hidden_from_the_network() -> None:
    agent = agent_for(MASKED_OBS, DISCRETE)
    mask = np.array([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=np.int8)
    obs = {"observation": np.zeros((2, 3)), "action_mask": mask}

    for deterministic in (True, False):
        assert agent.act_batch(obs, deterministic).tolist() == [2, 0]
    assert list(agent.model.preprocess.space) == ["observation"]  # type: ignore[call-overload]
    assert not agent_for(MASKED_OBS, DISCRETE, action_mask="none").masks.are_used


def test_a_mask_in_the_infos_may_have_one_array_per_choice() -> None:
    agent = agent_for(OBS, spaces.MultiDiscrete([2, 3]), action_mask="info")
    parts = np.empty(1, dtype=object)
    parts[0] = (np.array([0, 1]), np.array([0, 1, 0]))

    mask = agent.mask_of({"action_mask": parts})

    assert mask is not None
    assert mask.tolist() == [[False, True, False, True, False]]
    assert agent.act_batch(np.zeros((1, 3)), action_mask=mask).tolist() == [[1, 1]]


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_masks_recurrent_state_and_dict_observations_work_together(shared_trunk: bool) -> None:
    network = partial(Recurrent, size=5)
    agent = agent_for(MASKED_OBS, DISCRETE, network, shared_trunk=shared_trunk)
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
    with pytest.raises(ValueError, match="this policy is recurrent; pass memory="):
        agent.act_batch(obs)


@pytest.mark.parametrize(
    ("space", "infos", "words"),
    [
        (DISCRETE, {"action_mask": np.array([[1, 1, 0, 0], [0] * 4])}, "of env 1 allows no action"),
        (DISCRETE, {"action_mask": np.ones((2, 2))}, r"must have 4 entries, got shape \(2,\)"),
        (DISCRETE, {}, "the infos hold no action_mask"),
        (
            DISCRETE,
            {"action_mask": np.ones((2, 4)), "_action_mask": np.array([True, False])},
            "env 1 returned no action_mask",
        ),
        (
            spaces.MultiDiscrete([2, 2]),
            {"action_mask": np.array([[1, 1, 0, 0]])},
            "of env 0 allows no action",
        ),
    ],
)
def test_a_wrong_mask_is_refused(space: Any, infos: dict[str, Any], words: str) -> None:
    agent = agent_for(OBS, space, action_mask="info")

    with pytest.raises(MaskError, match=words):
        agent.masks.in_step({}, infos)


def test_a_policy_with_masks_does_not_act_without_them() -> None:
    with pytest.raises(MaskError, match="this policy needs masks"):
        agent_for(OBS, DISCRETE, action_mask="info").act_batch(np.zeros((1, 3)))


def test_mask_for_actions_that_take_none_is_refused() -> None:
    with pytest.raises(MaskError, match="the actions of this env take no mask; leave it out"):
        agent_for(OBS, BOX).act_batch(np.zeros((1, 3)), action_mask=np.ones((1, 2), bool))


@pytest.mark.parametrize(
    ("spaces_of_env", "source", "error", "words"),
    [
        ((OBS, BOX), "info", ActionSpaceError, "cannot be masked"),
        ((MASKED_OBS, DISCRETE), "x", MaskError, "=x: the observation has no such key; its keys"),
        ((MASKED_OBS, DISCRETE), "observation", MaskError, r"shape \(3,\); the action space needs"),
        ((OBS, DISCRETE), "x", MaskError, "it is not a Dict"),
        ((NESTED_MASK, DISCRETE), "action_mask", MaskError, "must be one array for all parts"),
    ],
)
def test_an_impossible_source_of_masks_is_refused(
    spaces_of_env: Any, source: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        agent_for(*spaces_of_env, action_mask=source)
