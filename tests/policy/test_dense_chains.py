"""Dense layers of a compiled graph become one operator, whatever module they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ml_pipeline.policy import dense_chains
from ml_pipeline.policy.dense_chains import fused

ROWS = 300


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels, which need a GPU; tests/contracts/test_backends.py has their numbers."""
    monkeypatch.setattr(dense_chains, "_why_not", lambda *_: None)


def found_in(function: Callable[[Tensor], Any], x: Tensor) -> list[tuple[Any, ...]]:
    """Layers, outputs and activation of each operator that replaces something in ``function``."""
    found: list[tuple[Any, ...]] = []

    def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        for node in fused(graph, torch.float16, keeps=True).graph.nodes:
            if "dense_chains" in str(node.target):
                _, _, layers, n_out, activation, *_ = node.args
                found.append((layers, n_out, activation))
        return lambda *inputs: tuple(torch.zeros(ROWS, 1) for _ in range(2))

    torch._dynamo.reset()
    torch.compile(function, backend=compile_graph, fullgraph=True)(x)
    return found


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes[:-1]):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Own(nn.Module):
    """A network as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 20), nn.Linear(20, 30), nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x).tanh()).tanh()
        return torch.as_tensor(self.last(hidden))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (mlp(3, 64, 65, 2), ([3, 64, 65], [2], "tanh")),
        (mlp(3, 64, 2, activation=nn.ReLU), ([3, 64], [2], "relu")),
        (mlp(3, 8, 8, 8, 8, 1), ([3, 8, 8, 8, 8], [1], "tanh")),
        (Own(), ([3, 20, 30], [2], "tanh")),
    ],
)
def test_a_network_of_dense_layers_is_one_operator(
    network: nn.Module, expected: tuple[Any, ...]
) -> None:
    assert found_in(lambda x: (network(x), x), torch.zeros(ROWS, 3)) == [expected]


def test_actor_and_critic_of_one_shape_are_one_operator() -> None:
    actor, critic, wide = mlp(3, 64, 2), mlp(3, 64, 1), mlp(3, 65, 1)
    x = torch.zeros(ROWS, 3)

    assert found_in(lambda x: (actor(x.view(ROWS, 3)), critic(x.view(ROWS, 3))), x) == [
        ([3, 64], [2, 1], "tanh")
    ]
    assert len(found_in(lambda x: (actor(x), wide(x)), x)) == 2
    assert len(found_in(lambda x: (actor(x), critic(x + 1.0)), x)) == 2


@pytest.mark.parametrize(
    "network",
    [
        mlp(3, 64, 2, activation=nn.SiLU),
        mlp(3, 1025, 2),
        mlp(3, 64, 65),
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 2)),
        mlp(3, 8, 2).double(),
    ],
)
def test_other_layers_stay_as_they_are(network: nn.Module) -> None:
    x = torch.zeros(ROWS, 3, dtype=next(network.parameters()).dtype)

    assert found_in(lambda x: (network(x), x), x) == []


def test_layers_whose_results_are_read_elsewhere_stay_as_they_are() -> None:
    first, last, x = nn.Linear(3, 8), nn.Linear(8, 2), torch.zeros(ROWS, 3)

    def with_features(x: Tensor) -> tuple[Tensor, Tensor]:
        features = first(x).tanh()
        return last(features), features.square()

    assert found_in(with_features, x) == []
    assert (
        found_in(lambda x: (last(first(x).tanh()), x), torch.zeros(ROWS, 3).requires_grad_()) == []
    )
    assert found_in(lambda x: (last(first(x).tanh()), x), torch.zeros(20, 3)) == []


def test_kernels_that_fail_are_not_used_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(dense_chains, "_why_not", lambda *_: "they are 0.5 from torch")

    def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        return fused(graph, torch.float16, keeps=True, tell=lines.append)

    network, x = mlp(3, 64, 2), torch.rand(ROWS, 3)
    torch._dynamo.reset()
    out = torch.compile(network, backend=compile_graph, fullgraph=True)(x)

    torch.testing.assert_close(out, network(x))
    assert lines == ["dense layers are not fused and run slower: they are 0.5 from torch"]
