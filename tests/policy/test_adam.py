"""FlatAdam: equal to torch's Adam, and no step on non-finite values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ml_pipeline.errors import UserError
from ml_pipeline.policy.optimiser import FlatAdam


def module(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def stepped(adam: FlatAdam, how: str, loss: float) -> tuple[float, bool]:
    if how == "plain":
        norm, finite = adam.step(0.01, torch.tensor(loss))
        return float(norm), bool(finite)
    return adam.step_on_cpu(0.01, loss)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a run on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["plain", "on cpu"])
def test_steps_equal_torchs_adam_with_its_gradient_clip(how: str) -> None:
    ours, theirs = module(), module()
    adam = FlatAdam(ours, eps=1e-5, max_grad_norm=0.5)
    peer = torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    for _ in range(5):
        adam.grad.zero_()
        loss = ours(obs).square().sum()
        loss.backward()
        norm, finite = stepped(adam, how, float(loss.detach()))
        peer.zero_grad()
        theirs(obs).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        peer.step()
        assert finite
        assert norm == pytest.approx(float(expected), rel=1e-5)

    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("how", ["plain", "on cpu"])
@pytest.mark.parametrize("broken", ["gradient", "loss"])
def test_non_finite_gradient_or_loss_changes_nothing(how: str, broken: str) -> None:
    adam = FlatAdam(module(), eps=1e-5, max_grad_norm=0.5)
    adam.grad.fill_(1.0)
    stepped(adam, how, 1.0)
    before = [adam.values.clone(), *(each.clone() for each in adam.state_dict().values())]

    adam.grad.fill_(1.0)
    if broken == "gradient":
        adam.grad[-1] = torch.nan
    _, finite = stepped(adam, how, torch.inf if broken == "loss" else 1.0)

    assert not finite
    after = [adam.values, *adam.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert adam.broken_gradients() == (["2.bias"] if broken == "gradient" else [])


def test_frozen_parameters_are_skipped_and_other_dtypes_are_refused() -> None:
    frozen = module()
    frozen[0].weight.requires_grad_(False)

    assert "0.weight" not in FlatAdam(frozen, eps=1e-5, max_grad_norm=0.5).names
    with pytest.raises(UserError, match=r"must be float32, got torch\.float64"):
        FlatAdam(module().double(), eps=1e-5, max_grad_norm=0.5)


def test_state_of_another_size_is_refused() -> None:
    adam = FlatAdam(module(), eps=1e-5, max_grad_norm=0.5)
    other = FlatAdam(nn.Linear(2, 2), eps=1e-5, max_grad_norm=0.5)

    with pytest.raises(ValueError, match="has 6 values, the network 26"):
        adam.load_state_dict(other.state_dict())


def test_moments_too_small_to_matter_become_zero(one_thread: None) -> None:
    adam = FlatAdam(module(), eps=1e-5, max_grad_norm=0.5)
    adam.grad.fill_(1e-38)
    adam.step_on_cpu(0.01, 1.0)  # the mean is 0.1 times the gradient, a denormal number

    assert all(not each.any() for name, each in adam.state_dict().items() if "step" not in name)
    assert torch.tensor(1e-39) * 0.5 > 0  # elsewhere such numbers stay as they are
