"""Minibatch: an index takes the same transitions or sequences of every field."""

from __future__ import annotations

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.loss import Minibatch
from ml_pipeline.policy.contracts import PolicyInput

INDEX = torch.tensor([3, 1])


def numbered(*shape: int, plus: float = 0.0) -> Tensor:
    """10 * (first index) + (second index) + ``plus``."""
    first = 10.0 * torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    second = torch.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2)) if shape[1:] else 0.0
    return (first + second + plus).expand(shape).clone()


def test_take_returns_the_same_transitions_of_every_field_and_leaf() -> None:
    obs = {"camera": numbered(4, 2), "arm/angle": numbered(4, plus=0.5)}
    inputs = PolicyInput(obs, numbered(4, 3) > 15.0, None, None)
    fields = [numbered(4, plus=100.0 * i) for i in range(1, 6)]

    taken = Minibatch(inputs, *fields).take(INDEX)

    assert isinstance(taken.inputs.obs, dict)
    leaves = {name: leaf.tolist() for name, leaf in taken.inputs.obs.items()}
    assert leaves == {"camera": [[30.0, 31.0], [10.0, 11.0]], "arm/angle": [30.5, 10.5]}
    assert taken.inputs.action_mask is not None
    assert taken.inputs.action_mask.tolist() == [[True] * 3, [False] * 3]
    assert taken.inputs.memory is None
    assert taken.inputs.episode_start is None
    assert [field.tolist() for field in taken[1:]] == [
        [100.0 * i + 30.0, 100.0 * i + 10.0] for i in range(1, 6)
    ]


def test_take_returns_whole_sequences_with_their_recurrent_state() -> None:
    memory, start = numbered(4, 2, plus=0.5), torch.zeros(3, 4, dtype=torch.bool)
    start[0, 3] = True
    inputs = PolicyInput(numbered(3, 4), None, memory, start)

    taken = Minibatch(inputs, *(numbered(3, 4) for _ in range(5))).take(INDEX)

    assert taken.inputs.obs.tolist() == [[3, 1], [13, 11], [23, 21]]  # type: ignore[union-attr]
    assert taken.value.tolist() == [[3, 1], [13, 11], [23, 21]]
    assert taken.inputs.memory is not None
    assert taken.inputs.memory.tolist() == [[30.5, 31.5], [10.5, 11.5]]
    assert taken.inputs.episode_start is not None
    assert taken.inputs.episode_start.tolist() == [[True, False], [False, False], [False, False]]


def test_mapped_changes_every_field_with_a_step_axis_and_sets_the_recurrent_state() -> None:
    inputs = PolicyInput(numbered(2, 3), None, numbered(3, 2), torch.ones(2, 3, dtype=torch.bool))
    batch = Minibatch(inputs, *(numbered(2, 3) for _ in range(5)))

    flat = batch.mapped(lambda field: field.flatten(0, 1), None)

    assert flat.inputs.memory is None
    assert flat.inputs.episode_start is not None
    assert flat.inputs.episode_start.shape == (6,)
    for field in (flat.inputs.obs, *flat[1:]):
        assert field.tolist() == [0, 1, 2, 10, 11, 12]  # type: ignore[union-attr]
    kept = batch.mapped(lambda field: field, inputs.memory)
    assert kept.inputs.memory is inputs.memory
