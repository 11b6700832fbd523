"""RolloutBuffer: why episodes end is decided here, and every transition is learned from once."""

from __future__ import annotations

import pytest
import torch

from ml_pipeline.protocols import PolicySample
from ml_pipeline.training.rollout_buffer import Outcome, RolloutBuffer

CPU = torch.device("cpu")


def written(n_steps: int, n_envs: int) -> RolloutBuffer:
    """Value = 10 * step + env; observation and action the same; nothing ends."""
    buffer = RolloutBuffer(n_steps, n_envs, obs_shape=(1,), device=CPU)
    for t in range(n_steps):
        place = 10.0 * t + torch.arange(n_envs)
        sample = PolicySample(place.long(), -place, place)
        no = torch.zeros(n_envs, dtype=torch.bool)
        buffer.write(t, place.unsqueeze(1), sample, Outcome(place, no, no, torch.zeros(n_envs)))
    return buffer


def test_the_successor_is_the_next_value_the_final_value_or_nothing() -> None:
    buffer = written(2, 4)
    buffer.reward.zero_()
    buffer.value.zero_()
    buffer.truncated[1] = torch.tensor([False, True, False, True])
    buffer.terminated[1] = torch.tensor([False, False, True, True])
    buffer.final_value[1] = 7.0

    buffer.finish(torch.full((4,), 3.0), gamma=1.0, lam=0.0)

    assert buffer.advantage[1].tolist() == [3.0, 7.0, 0.0, 0.0]
    assert buffer.advantage[0].tolist() == [0.0] * 4


def test_the_value_target_is_advantage_plus_value() -> None:
    buffer = written(1, 2)

    buffer.finish(torch.tensor([4.0, 6.0]), gamma=0.5, lam=1.0)

    # reward + gamma * last value, in row 0: 0 + 2 and 1 + 3
    assert buffer.value_target.tolist() == [[2.0, 4.0]]


def test_every_transition_comes_once_per_epoch_with_its_fields_together() -> None:
    buffer = written(4, 3)
    buffer.finish(torch.zeros(3), gamma=1.0, lam=1.0)

    batches = list(buffer.minibatches(3, torch.Generator().manual_seed(1)))

    actions = torch.cat([batch.action for batch in batches])
    assert [len(batch.action) for batch in batches] == [4, 4, 4]
    assert sorted(actions.tolist()) == [10 * t + env for t in range(4) for env in range(3)]
    assert actions.tolist() != sorted(actions.tolist())
    for batch in batches:
        assert batch.obs.flatten().tolist() == batch.action.tolist()
        assert batch.log_prob.tolist() == (-batch.action).tolist()


def test_a_rollout_that_cannot_be_cut_evenly_is_refused() -> None:
    buffer = written(4, 3)

    with pytest.raises(ValueError, match="4 x 3 = 12 transitions cannot be cut into 5"):
        next(buffer.minibatches(5, torch.Generator()))
