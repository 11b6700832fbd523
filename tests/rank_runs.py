"""Training runs for tests of several ranks: ``torchrun ... rank_runs.py FOLDER DEVICE CASE...``.

Each case trains and saves the weights of every rank, with a checksum after each gradient step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ml_pipeline.assembly.run import train
from ml_pipeline.policy.optimiser import FlatAdam, TorchOptimiser
from ml_pipeline.training.contracts import Callback
from ml_pipeline.training.loop import Loop

# 8 envs in all; 3 iterations of 2 epochs of 2 minibatches: 12 gradient steps.
COMMON = ["vec_env=serial", "logger=[]", "~callbacks.evaluation", "num_episodes=3"]
ROLLOUTS = ["agent.n_steps=16", "agent.n_epochs=2", "agent.n_minibatches=2"]
# 15 rows, of which the buffer holds 12; 112 env steps before the last one make 18 updates due.
REPLAY = [
    *("agent.iteration_length=5", "agent.buffer_size=96", "agent.batch_size=16"),
    *("agent.learning_starts=40", "agent.updates_per_env_step=0.25", "network.hidden_sizes=[16]"),
]
TENSOR = ["env=torch_pendulum", "vec_env=auto", "+env.kwargs.max_episode_steps=7"]
NORMALISED = ["agent.normalize_obs=true", "agent.scale_reward=true"]
CASES = {
    "discrete": ["env=cartpole"],
    "plain_torch": ["env=cartpole", "agent.fast=off"],
    "kl_stop": ["env=cartpole", "agent.max_kl=1e-7", "agent.learning_rate_schedule=adaptive"],
    "continuous": ["env=pendulum"],
    "normalised": ["env=pendulum", *NORMALISED],
    "recurrent": ["env=cartpole", "network=lstm"],
    "tensor": [*TENSOR, *NORMALISED],
    "parts": ["env=lanes"],
    "ideas": [
        *("env=pendulum", "agent.loss._target_=own_ideas.with_metrics"),
        *("agent.optimizer._target_=torch.optim.AdamW", "agent.recompute_advantages=true"),
        *("agent.on_rollout._target_=own_ideas.double_reward", "network.critic.hidden_sizes=[32]"),
    ],
    "attention": ["env=cartpole", "network=trxl", "network.window=8"],
}
STACK = "{_target_: gymnasium.wrappers.FrameStackObservation, stack_size: 4}"
SAC, DQN = ["agent=sac", "env=pendulum"], ["agent=dqn", "env=cartpole", "agent.target_every=4"]
REPLAY_CASES = {
    "sac": SAC,
    "sac, plain torch": [
        *(*SAC, "agent.fast=off", "agent.normalize_obs=true", "agent.n_step=3"),
        *("agent.policy_delay=2", "agent.max_grad_norm=0.5"),
    ],
    "sac, layer norm": [*SAC, "agent.critic_layer_norm=true"],
    "sac, gsde": [*SAC, "agent.box_policy=gsde", "agent.gsde_every_steps=3"],
    "sac, discrete": ["agent=sac", "env=cartpole"],
    "sac, empty parts": [*SAC, "agent.batch_size=2"],
    "dqn": [*DQN, "agent.normalize_obs=true"],
    "dqn, prioritised": [*DQN, "agent.priority_exponent=0.6", "agent.n_step=3"],
    "dqn, quantiles": [*DQN, "agent.n_quantiles=5"],
    "dqn, frames": [
        *(*DQN, "env.id=null", "env.target=tiny_envs.FramesEnv", "agent.stacked_frames=4"),
        f"+env.wrappers.stack={STACK}",
    ],
    "sac, masks": ["agent=sac", "env.id=null", "env.target=tiny_envs.ForbiddingEnv"],
    "sac, tensor": ["agent=sac", *TENSOR, "agent.normalize_obs=true"],
    "dqn, tensor": ["agent=dqn", "env=torch_cartpole", "vec_env=auto", "agent.n_step=3"],
    "dqn, empty parts": [*DQN, "agent.batch_size=2", "agent.priority_exponent=0.6"],
}
PARTS = ("model", "target", "actor", "critics", "targets", "temperature", "preprocess")


class Loss(NamedTuple):
    """The result of an update."""

    loss: float
    finite: bool


class Rows(Callback):
    """Keeps the metrics of every iteration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(self, loop: Loop, metrics: dict[str, float]) -> None:
        self.rows.append({name: each for name, each in metrics.items() if "time/" not in name})


def trained(folder: Path, case: str, n_envs: int, device: str = "cpu") -> dict[str, Any]:
    """Train one case; returns weights, checksums after each gradient step, and metrics."""
    checksums: list[float] = []
    rows = Rows()
    steps: dict[tuple[Any, str], Any] = {
        (owner, name): getattr(owner, name)
        for owner, names in {FlatAdam: ("step", "step_on_cpu"), TorchOptimiser: ("step",)}.items()
        for name in names
    }

    def recorded(method: Any) -> Any:
        def step(self: Any, *args: Any) -> Any:
            result = method(self, *args)
            if self.world.size > 1:  # not in the check of the fast backend
                checksums.append(float(self.values.double().sum()))
            return result

        return step

    for (owner, name), method in steps.items():
        setattr(owner, name, recorded(method))
    try:
        own = [*ROLLOUTS, *CASES[case]] if case in CASES else [*REPLAY, *REPLAY_CASES[case]]
        settings = [f"n_envs={n_envs}", f"device={device}", f"run_root={folder}"]
        result = train([*COMMON, *own, *settings], callbacks={"rows": rows})
    finally:
        for (owner, name), method in steps.items():
            setattr(owner, name, method)
    state = result.agent.state_dict()
    return {
        "model": {
            f"{part} {name}": each.cpu().clone()
            for part in PARTS
            for name, each in state.get(part, {}).items()
        },
        "checksums": checksums,
        "env_steps": result.env_steps,
        "rows": rows.rows,
    }


def of_two_ranks(folder: Path, *cases: str, device: str = "cpu") -> dict[str, list[dict[str, Any]]]:
    """The results of both ranks, by case; one launch trains all cases."""
    process = torchrun(2, __file__, str(folder), device, *cases)
    output, _ = process.communicate(timeout=200 if device == "cpu" else 280)  # it compiles
    assert process.returncode == 0, output
    return {
        case: [torch.load(folder / f"{case}_{rank}.pt", weights_only=True) for rank in (0, 1)]
        for case in cases
    }


def torchrun(n_ranks: int, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``n_ranks`` processes of a script, on a free port of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*command, f"--nproc_per_node={n_ranks}", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    target, chosen, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for each in names:
        result = trained(Path(target), each, n_envs=4, device=chosen)
        torch.save(result, Path(target) / f"{each}_{rank}.pt")
