"""Self-play in a tensor env on a GPU: same numbers with and without graphs, and an exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Capture, read_rows
from test_gpu_runs import assert_close, fallbacks

from ml_pipeline.assembly.run import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
]

GAMES = [
    *("env=torch_hockey", "env.kwargs.mode=shooting", "opponent=self_play", "device=cuda"),
    *("opponent.add_every_steps=2048", "opponent.capacity=2", "+opponent.scripted.weak=0.3"),
    *("n_envs=64", "logger=none", "network.hidden_sizes=[32]", "precision=float32"),
    *("~callbacks.evaluation", "callbacks.checkpoints.every_steps=4096", "total_steps=12288"),
]
KINDS = {
    "ppo": ["agent.n_steps=16", "agent.n_minibatches=2", "agent.n_epochs=2"],
    "sac": [
        *("agent=sac", "agent.learning_starts=512", "agent.batch_size=32"),
        *("agent.iteration_length=16", "agent.buffer_size=4096", "agent.updates_per_env_step=0.01"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_self_play_with_graphs_gives_the_same_numbers_as_without(
    kind: str, here: Path, capsys: Capture
) -> None:
    graph = read_rows(train([*GAMES, *KINDS[kind], "compile=graph"]).run_dir)
    output = capsys.readouterr().out
    plain = read_rows(train([*GAMES, *KINDS[kind], "compile=off"]).run_dir)

    assert fallbacks(output) == []
    assert_close(graph[:4], plain[:4])  # later, rounding decides some games


@pytest.mark.parametrize("kind", KINDS)
def test_self_play_with_graphs_resumes_bit_for_bit(kind: str, here: Path) -> None:
    stop = "+callbacks.stop={{_target_: own_parts.StopAt, iteration: {}}}"
    whole = train([*GAMES, *KINDS[kind], "compile=graph"]).run_dir
    part = train([*GAMES, *KINDS[kind], "compile=graph", stop.format(6)]).run_dir
    train([f"resume={part}", stop.format(99)])

    assert read_rows(part) == read_rows(whole)
