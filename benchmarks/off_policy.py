"""DQN and SAC training speed compared with Stable-Baselines3, with the same settings.

    python benchmarks/off_policy.py --rounds 5
    python benchmarks/off_policy.py --tasks sac --steps 3000
    python benchmarks/off_policy.py --gpu        # SAC on a GPU: HalfCheetah in workers, tensor envs

Each training is a separate process with one torch thread. The libraries take turns, so a slow phase
of the machine affects both. ``steps/s`` is the speed from the first update on, so that imports,
setup and random steps do not count. ``limit`` is the time of the matrix products alone, measured in
the same process, as a share of the time that our training takes. Compare figures within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from raw_file import add_json_option, write_raw

REPOSITORY = Path(__file__).resolve().parents[1]


class Task(NamedTuple):
    """The settings of both libraries."""

    env: str
    hidden: int
    batch: int
    learning_starts: int
    updates_per_step: float
    steps: int


TASKS = {
    # rl-baselines3-zoo: 128 gradient steps after every 256 env steps.
    "dqn": Task("CartPole-v1", 256, 64, 1_000, 0.5, 6_000),
    "sac": Task("Pendulum-v1", 256, 256, 500, 1.0, 2_000),
}


def train_ours(name: str, task: Task, seed: int) -> float:
    from ml_pipeline.assembly.run import train
    from ml_pipeline.runs.loggers import read_metrics

    settings = [
        *(f"agent={name}", f"env.id={task.env}", f"seed={seed}", "n_envs=1", "vec_env=serial"),
        *("device=cpu", "logger=none", "network.activation=relu"),
        f"network.hidden_sizes=[{task.hidden},{task.hidden}]",
        f"agent.batch_size={task.batch}",
        f"agent.learning_starts={task.learning_starts}",
        f"agent.updates_per_env_step={task.updates_per_step}",
        *("agent.buffer_size=50000", "agent.iteration_length=250", "~callbacks.evaluation"),
        *(f"total_steps={task.steps}", "callbacks.checkpoints.every_steps=1e9"),
    ]
    if name == "dqn":  # SB3 has neither
        settings += ["agent.duelling=false", "agent.double=false"]
    rows = read_metrics(train(settings).run_dir / "metrics.csv")
    learning = [row for row in rows if float(row["env_steps"]) > task.learning_starts + 250]
    seconds = sum(float(row["time/iteration_seconds"]) for row in learning)
    return 250 * len(learning) / seconds


# The env, their number, updates per env step, and env steps in all.
GPU_TASKS = {
    "HalfCheetah-v5, 8 envs in 7 workers": ("env.id=HalfCheetah-v5", 8, 1.0, 40_000),
    "torch_pendulum, 64 envs": ("env=torch_pendulum", 64, 1 / 64, 400_000),
    "torch_pendulum, 64 envs, 8 updates": ("env=torch_pendulum", 64, 1 / 8, 200_000),
}


def train_on_gpu(task: str) -> tuple[float, float]:
    """Median env steps and updates per second of SAC, 256 x 256, batch 256, tf32."""
    from ml_pipeline.assembly.run import train
    from ml_pipeline.runs.loggers import read_metrics

    env, n_envs, ratio, steps = GPU_TASKS[task]
    workers = [] if "torch" in env else ["vec_env=parallel", "vec_env.n_workers=7"]
    settings = [
        *("agent=sac", env, f"n_envs={n_envs}", *workers, "device=cuda", "precision=tf32"),
        *("logger=none", "network.activation=relu", "network.hidden_sizes=[256,256]"),
        *("agent.learning_starts=1024", f"agent.updates_per_env_step={ratio}"),
        *("~callbacks.evaluation", "callbacks.checkpoints.every_steps=1e9"),
        f"total_steps={steps}",
    ]
    rows = read_metrics(train(settings).run_dir / "metrics.csv")
    learning = [row for row in rows if float(row["time/updates_per_env_step"]) > 0][5:]
    return (
        statistics.median(float(row["time/env_steps_per_second"]) for row in learning),
        statistics.median(float(row["time/updates_per_second"]) for row in learning),
    )


def print_gpu_table(json_file: Path | None) -> None:
    raw = {}
    print("| SAC | env steps/s | updates/s |")
    print("|---|---|---|")
    for task in GPU_TASKS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            env_steps, updates = train_on_gpu(task)
            os.chdir(REPOSITORY)
        print(f"| {task} | {env_steps:,.0f} | {updates:,.0f} |", flush=True)
        raw[task] = {"env_steps_per_second": env_steps, "updates_per_second": updates}
    write_raw(json_file, raw)


def train_sb3(name: str, task: Task, seed: int) -> float:
    import torch
    from stable_baselines3 import DQN, SAC
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)

    class Clock(BaseCallback):  # type: ignore[misc]  # the peer is not always installed
        start, first = 0.0, 0

        def _on_step(self) -> bool:
            if not self.start and self.num_timesteps >= task.learning_starts + 250:
                self.start, self.first = time.perf_counter(), self.num_timesteps
            return True

    every = 2 if name == "dqn" else 1
    model: Any = (DQN if name == "dqn" else SAC)(
        "MlpPolicy",
        task.env,
        seed=seed,
        device="cpu",
        batch_size=task.batch,
        buffer_size=50_000,
        learning_starts=task.learning_starts,
        train_freq=every,
        gradient_steps=round(task.updates_per_step * every),
        policy_kwargs={"net_arch": [task.hidden, task.hidden]},
    )
    clock = Clock()
    model.learn(task.steps, callback=clock)
    return float(model.num_timesteps - clock.first) / (time.perf_counter() - clock.start)


def products_seconds(name: str, task: Task) -> float:
    """Seconds that the matrix products of one env step need, at the speed of this core."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(task.batch, task.hidden), torch.randn(task.hidden, task.hidden)
    start = time.perf_counter()
    for _ in range(200):
        left @ right
    per_product = (time.perf_counter() - start) / 200
    # Products of hidden x hidden in one update: forward 1, backward 2.
    n_products = {"dqn": 4, "sac": 18}[name]
    return per_product * n_products * task.updates_per_step


def one(name: str, task: Task, library: str, seed: int) -> dict[str, float]:
    """One training in a process of its own."""
    words = [sys.executable, __file__, "--worker", json.dumps([name, task, library, seed])]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="env steps per training")
    parser.add_argument("--gpu", action="store_true", help="SAC on a GPU, without a peer")
    add_json_option(parser)
    args = parser.parse_args()
    if args.gpu:
        print_gpu_table(args.json)
        return
    if args.worker:
        name, fields, library, seed = json.loads(args.worker)
        task = Task(*fields)
        train = train_ours if library == "ours" else train_sb3
        speed = train(name, task, seed)
        print(json.dumps({"speed": speed, "products": products_seconds(name, task)}))
        return
    print("| task | ours, steps/s | SB3, steps/s | ratio | matrix products, share of ours |")
    print("|---|---|---|---|---|")
    raw = {}
    for name in args.tasks:
        task = TASKS[name]
        task = task._replace(steps=args.steps or task.steps)
        ours, sb3 = [], []
        for seed in range(1, args.rounds + 1):
            ours.append(one(name, task, "ours", seed))
            sb3.append(one(name, task, "sb3", seed))
        ratios = [a["speed"] / b["speed"] for a, b in zip(ours, sb3, strict=True)]
        shares = [each["products"] * each["speed"] for each in ours]
        print(
            f"| {name} {task.env}, {task.hidden} x {task.hidden}, batch {task.batch} "
            f"| {statistics.median(each['speed'] for each in ours):,.0f} "
            f"| {statistics.median(each['speed'] for each in sb3):,.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {statistics.median(shares):.2f} |",
            flush=True,
        )
        raw[name] = {**task._asdict(), "ours": ours, "sb3": sb3}
    write_raw(args.json, raw)


if __name__ == "__main__":
    main()
