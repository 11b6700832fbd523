"""Vector envs side by side: start-up, memory of a worker, env steps per second.

    python benchmarks/vec_env.py [--env CartPole-v1] [--n-envs 8] [--repeats 5]

All are built first and timed in turn, a short window each, repeated; the figures are medians.
Compare within a run, not across runs: machines are noisy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from ml_pipeline.envs.cores import available_cores
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv

AnyVectorEnv = VectorEnv[Any, Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Vector envs side by side.")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one timed window")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {available_cores()} cores, {options.env}")

    env_fns: list[Callable[[], gym.Env[Any, Any]]] = [EnvFactory(options.env)] * options.n_envs
    show_start(env_fns)
    envs: dict[str, AnyVectorEnv] = {
        "serial": SerialEnv(env_fns, seed=1),
        **{f"parallel, {n} workers": ParallelEnv(env_fns, seed=1, n_workers=n) for n in (1, 2, 4)},
        "gymnasium sync": SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP),
        "gymnasium async": AsyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP),
    }
    speeds: dict[str, list[float]] = {name: [] for name in envs}
    for env in envs.values():
        env.reset(seed=1)
    for _ in range(options.repeats):
        for name, env in envs.items():
            speeds[name].append(steps_per_second(env, options.seconds))
    peer = statistics.median(speeds["gymnasium async"])
    print(f"\n{'':<22}{'env steps/s':>12}{'over async':>12}{'us per turn':>13}")
    for name, each in speeds.items():
        median = statistics.median(each)
        turn = options.n_envs / median * 1e6
        print(f"{name:<22}{median:>12,.0f}{median / peer:>11.1f}x{turn:>13.0f}")
    for env in envs.values():
        env.close()


def show_start(env_fns: list[Callable[[], gym.Env[Any, Any]]]) -> None:
    """Seconds until 4 workers have built their envs, and what each of them holds."""
    for method in ("spawn", "fork"):
        start = time.perf_counter()
        env = ParallelEnv(env_fns, n_workers=4, start_method=method)
        seconds = time.perf_counter() - start
        env.reset(seed=1)
        megabytes = [resident_megabytes(pid) for pid in env.worker_pids]
        print(f"4 {method} workers: {seconds:.2f} s to start, at most {max(megabytes):.0f} MB each")
        env.close()


def resident_megabytes(pid: int) -> float:
    """Resident memory of a process; nan where there is no /proc."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1e3


def steps_per_second(env: AnyVectorEnv, seconds: float) -> float:
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    turns, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for action in actions:
            env.step(action)
        turns += len(actions)
    return turns * env.num_envs / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
