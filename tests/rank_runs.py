"""Training runs for tests of several ranks: ``torchrun --nproc_per_node=2 rank_runs.py FOLDER``.

Each case trains and saves the weights of every rank, with a checksum after each gradient step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ml_pipeline.agents.adam import FlatAdam
from ml_pipeline.build import train
from ml_pipeline.protocols import Callback
from ml_pipeline.training.loop import Loop

# 8 envs in all; 3 iterations of 2 epochs of 2 minibatches: 12 gradient steps.
COMMON = [
    "vec_env=serial",
    "device=cpu",
    "logger=[]",
    "~callbacks.evaluation",
    "agent.n_steps=16",
    "agent.n_epochs=2",
    "agent.n_minibatches=2",
    "num_episodes=3",
]
NORMALISED = ["agent.normalize_obs=true", "agent.scale_reward=true"]
CASES = {
    "discrete": ["env=cartpole"],
    "plain_torch": ["env=cartpole", "agent.fast=off"],
    "kl_stop": ["env=cartpole", "agent.max_kl=1e-7", "agent.learning_rate_schedule=adaptive"],
    "continuous": ["env=pendulum"],
    "normalised": ["env=pendulum", *NORMALISED],
    "recurrent": ["env=cartpole", "network=lstm"],
    "tensor": ["env=torch_pendulum", "vec_env=auto", *NORMALISED],
}


class Rows(Callback):
    """Keeps the metrics of every iteration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(self, loop: Loop, metrics: dict[str, float]) -> None:
        self.rows.append({name: each for name, each in metrics.items() if "time/" not in name})


def trained(folder: Path, case: str, n_envs: int) -> dict[str, Any]:
    """Train one case; returns weights, checksums after each gradient step, and metrics."""
    checksums: list[float] = []
    rows = Rows()
    steps = {name: getattr(FlatAdam, name) for name in ("step", "step_on_cpu")}

    def recorded(name: str) -> Any:
        def step(self: FlatAdam, *args: Any) -> Any:
            result = steps[name](self, *args)
            if self.world.size > 1:  # not in the check of the fast backend
                checksums.append(float(self.values.double().sum()))
            return result

        return step

    for name in steps:
        setattr(FlatAdam, name, recorded(name))
    try:
        overrides = [*COMMON, *CASES[case], f"n_envs={n_envs}", f"run_root={folder}"]
        result = train(overrides, callbacks={"rows": rows})
    finally:
        for name, step in steps.items():
            setattr(FlatAdam, name, step)
    agent: Any = result.agent
    return {
        "model": {name: each.clone() for name, each in agent.model.state_dict().items()},
        "checksums": checksums,
        "env_steps": result.env_steps,
        "rows": rows.rows,
    }


def torchrun(n_ranks: int, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``n_ranks`` processes of a script, on a free port of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, f"--nproc_per_node={n_ranks}", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for each in names:
        torch.save(trained(Path(target), each, n_envs=4), Path(target) / f"{each}_{rank}.pt")
