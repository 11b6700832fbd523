"""DQN and SAC on a GPU: same numbers with and without graphs, and an exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Capture, read_rows
from test_gpu_runs import assert_close, fallbacks

from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
]

SMALL = [
    *("n_envs=4", "device=cuda", "logger=none", "network.hidden_sizes=[32]"),
    *("agent.learning_starts=32", "agent.batch_size=16", "agent.iteration_length=8"),
    *("agent.buffer_size=160", "total_steps=320", "precision=float32", "~callbacks.evaluation"),
    "callbacks.checkpoints.every_steps=64",
]
DQN, SAC = ["agent=dqn", "agent.target_every=4"], ["agent=sac", "agent.policy_delay=2"]
PRIORITISED = ["agent.priority_exponent=0.6", "agent.n_step=3", "agent.n_quantiles=5"]
EIGHT = ["agent.updates_per_env_step=3"]  # 12 per step of all envs: 8 of them can be one graph
KINDS = [
    [*DQN, "env=cartpole"],
    [*DQN, "env=cartpole", *PRIORITISED],
    [*DQN, "env=torch_cartpole", *PRIORITISED, *EIGHT, "agent.target_every=20"],
    [*SAC, "env=pendulum"],
    [*SAC, "env=torch_pendulum", "agent.normalize_obs=true", *EIGHT, "agent.policy_delay=1"],
    [*SAC, "env=pendulum", "agent.critic_layer_norm=true"],
]


@pytest.mark.parametrize("settings", KINDS, ids=" ".join)
def test_replay_with_graphs_gives_the_same_numbers_as_without(
    settings: list[str], here: Path, capsys: Capture
) -> None:
    graph = read_rows(train([*SMALL, *settings, "compile=graph"]).run_dir)
    output = capsys.readouterr().out
    plain = read_rows(train([*SMALL, *settings, "compile=off"]).run_dir)

    assert fallbacks(output) == []
    assert_close(graph[:6], plain[:6])


@pytest.mark.parametrize("settings", KINDS, ids=" ".join)
def test_a_replay_run_with_graphs_resumes_bit_for_bit(settings: list[str], here: Path) -> None:
    stop = "+callbacks.stop={{_target_: own_parts.StopAt, iteration: {}}}"
    whole = train([*SMALL, *settings, "compile=graph"]).run_dir
    part = train([*SMALL, *settings, "compile=graph", stop.format(5)]).run_dir
    train([f"resume={part}", stop.format(99)])

    assert _shown(part) == _shown(whole)
    agents = [load_checkpoint(RunFolder.open(run), LATEST)["agent"] for run in (part, whole)]
    assert _equal(*agents)


@pytest.mark.parametrize("settings", [KINDS[0], KINDS[3]], ids=" ".join)
def test_a_run_of_a_gpu_is_loaded_and_resumed_on_a_cpu(settings: list[str], here: Path) -> None:
    run = train([*SMALL, *settings]).run_dir

    assert load_agent(run).env_steps == 320
    assert train([f"resume={run}", "device=cpu", "total_steps=640"]).env_steps == 640


def _shown(run: Path) -> list[dict[str, str]]:
    skipped = "time/", "gpu/"
    return [{k: v for k, v in row.items() if not k.startswith(skipped)} for row in read_rows(run)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
