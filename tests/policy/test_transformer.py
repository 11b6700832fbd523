"""TransformerXL: the window of each step, resets, and runs that need memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Capture, small
from gymnasium import spaces
from torch import Tensor

from ml_pipeline import load, train
from ml_pipeline.__main__ import main
from ml_pipeline.errors import UserError
from ml_pipeline.policy.transformer import TransformerXL
from ml_pipeline.runs.loggers import read_metrics

VECTOR = spaces.Box(-1, 1, (3,))
WINDOW = 3


def network(n_layers: int = 1, window: int = WINDOW) -> TransformerXL:
    torch.manual_seed(1)
    return TransformerXL(VECTOR, size=8, n_layers=n_layers, n_heads=2, window=window)


def played(net: TransformerXL, obs: Tensor, starts: Tensor) -> Tensor:
    with torch.no_grad():
        features, _ = net(obs, torch.zeros(obs.shape[1], net.state_size), starts)
    return features  # type: ignore[no-any-return]


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize(("n_steps", "window"), [(2, 3), (9, 3), (150, 1), (150, 80)])
@torch.no_grad()
def test_sequence_gives_the_same_features_as_single_steps(
    n_layers: int, n_steps: int, window: int
) -> None:
    net = network(n_layers, window)
    obs, starts = torch.randn(n_steps, 4, 3), torch.rand(n_steps, 4) < 0.1
    state = torch.zeros(4, net.state_size)
    for _ in range(5):  # the state of an episode that has begun
        _, state = net(torch.randn(1, 4, 3), state, torch.zeros(1, 4, dtype=torch.bool))

    features, last = net(obs, state, starts)

    for t in range(n_steps):
        one, state = net(obs[t : t + 1], state, starts[t : t + 1])
        torch.testing.assert_close(one[0], features[t], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("n_layers", "reach"), [(1, WINDOW), (2, 2 * WINDOW)])
def test_a_step_sees_itself_and_the_window_of_each_layer_before_it(
    n_layers: int, reach: int
) -> None:
    net, start = network(n_layers), torch.zeros(20, 1, dtype=torch.bool)
    obs = torch.randn(20, 1, 3)
    before = played(net, obs, start)
    obs[10] += 1.0

    changed = (played(net, obs, start) != before).any(dim=-1).flatten()

    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + reach + 1))


def test_nothing_passes_the_start_of_an_episode_not_even_nan() -> None:
    net = network(n_layers=2)
    obs, start = torch.randn(12, 2, 3), torch.zeros(12, 2, dtype=torch.bool)
    start[6, 0] = True
    obs[:6] = torch.nan

    features = played(net, obs, start)
    fresh = played(net, obs[6:], start[6:])

    assert features[:6].isnan().all()
    torch.testing.assert_close(features[6:, 0], fresh[:, 0])
    assert features[6:, 1].isnan().all()  # the same episode goes on


def test_the_state_holds_the_inputs_of_the_window_and_which_rows_are_filled() -> None:
    net = network(n_layers=2)
    obs, start = torch.randn(5, 2, 3), torch.zeros(5, 2, dtype=torch.bool)
    start[3, 1] = True

    with torch.no_grad():
        _, state = net(obs, torch.zeros(2, net.state_size), start)
        embedded = net.embedding(net.encoder(obs.flatten(0, 1))).view(5, 2, -1)
    rows = state.view(2, WINDOW, -1)

    assert net.state_size == WINDOW * (2 * 8 + 1)
    assert rows[0, :, -1].tolist() == [1.0, 1.0, 1.0]
    assert rows[1, :, -1].tolist() == [0.0, 1.0, 1.0]
    torch.testing.assert_close(rows[0, :, :8], embedded[2:, 0])
    torch.testing.assert_close(rows[1, 1:, :8], embedded[3:, 1])
    assert rows[1, 0].eq(0.0).all()


def test_attention_of_one_head_by_hand() -> None:
    net = TransformerXL(spaces.Box(-1, 1, (2,)), size=2, n_heads=1, window=1)
    (layer,) = net.layers
    for each in (layer.query, layer.key, layer.value):
        torch.nn.init.eye_(each.weight)
        torch.nn.init.zeros_(each.bias)
    with torch.no_grad():
        layer.distances.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    key = torch.tensor([[[[3.0, 0.0], [0.0, 1.0]]]])  # the step before, and this one

    found = layer._attended(key[:, :, 1:] + key[:, :, :1], key, key, torch.zeros(1, 2))

    # The query is (3, 1): 9 + 3 for the step before with its distance, 1 for this one.
    weight = 1.0 / (1.0 + np.exp((1.0 - 12.0) / np.sqrt(2.0)))
    assert found.flatten().tolist() == pytest.approx([3.0 * weight, 1.0 - weight], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 6, "n_heads": 4}, "n_heads=4 must divide size=6"),
        ({"window": 0}, "window must be positive"),
        ({"n_layers": 0}, "n_layers must be positive"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TransformerXL(VECTOR, **options)


TRXL = ["network=trxl", "network.size=8", "network.window=4", "network.n_heads=2"]


@pytest.mark.parametrize("env", ["cartpole", "lanes"])
def test_run_is_trained_exported_and_played(here: Path, env: str, capsys: Capture) -> None:
    run = train([*small(), *TRXL, f"env={env}"]).run_dir

    assert main(["export", str(run), "--format", "pt2"]) == 0
    assert "actions equal" in capsys.readouterr().out

    live, file = load(run), load(run / "policy.pt2")
    mask = np.ones(4) if env == "lanes" else None
    obs = live.observation_space.sample()
    for _ in range(6):  # longer than the window
        ours, theirs = (each.predict(obs, action_mask=mask) for each in (live, file))
        assert str(ours) == str(theirs)


def test_replay_refuses_it_like_other_recurrent_networks(here: Path) -> None:
    with pytest.raises(UserError, match="network TransformerXL is recurrent, which this agent"):
        train(["agent=dqn", "env=cartpole", *TRXL, "logger=none", "device=cpu"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_corridor_is_learned(here: Path) -> None:
    settings = ["experiment=corridor", "seed=1", "total_steps=8_192", "logger=none"]
    run = train([*settings, "device=cpu", "vec_env=serial"]).run_dir

    last = read_metrics(run / "metrics.csv")[-1]

    assert float(last["eval/episode_return"]) == 1.0  # 0.5 without memory
