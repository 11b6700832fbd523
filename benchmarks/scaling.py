"""Scaling: speed, CPU and memory for 1 to 16 envs in every mode, and settings for this machine.

    make bench-scaling
    python benchmarks/scaling.py --envs cartpole hockey --n-envs 1 2 4 --seconds 0.5

Random actions, without a policy: ``vec_env=auto`` also times the policy and may stay serial for
cheap envs. CPU is in cores, over this process and the workers. Memory is that of the largest
worker.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import runpy
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
ENVS = ("cartpole", "hockey", "trading", "game_boy")
MODES = ("serial", "parallel", "shared")
NEARLY = 0.95  # of the best speed: then the setting with fewer envs is recommended


class Cell(NamedTuple):
    """One measurement."""

    mode: str
    n_envs: int
    steps: float  # per second
    episodes: float | None  # per second; None if no episode ended
    cores: float | None  # None if the system does not report it
    worker_mb: float | None  # None without workers


def env_factory(name: str, folder: Path) -> EnvFactory:
    """The env of the preset; game_boy plays the test ROM."""
    # Here, because workers import this file, and the door imports torch.
    from ml_pipeline.assembly.build import build_env_factory
    from ml_pipeline.assembly.compose import checked_config, compose_config

    overrides = [f"env={name}"]
    if name == "game_boy":
        roms = runpy.run_path(str(REPOSITORY / "tests" / "game_boy_roms.py"))
        files = roms["write_game"](folder, "timing")
        overrides += [f"env.kwargs.{key}={value}" for key, value in files.items()]
        overrides += ["env.kwargs.episode_length=200"]
    return build_env_factory(checked_config(compose_config(overrides)).env)


def measured(make: Callable[[], gym.Env[Any, Any]], mode: str, n_envs: int, options: Any) -> Cell:
    """The fastest of several windows: another program can take a core at any time."""
    env: SerialEnv | ParallelEnv
    if mode == "serial":
        env = SerialEnv([make] * n_envs, seed=1, infos="final")
    else:
        env = ParallelEnv([make] * n_envs, seed=1, infos="final", main_slice=mode == "shared")
    try:
        env.reset()
        env.action_space.seed(1)
        actions = itertools.cycle([env.action_space.sample() for _ in range(50)])
        windows = [_window(env, actions, options.seconds) for _ in range(options.rounds)]
        steps, cores, _, _ = max(windows, key=lambda window: window[0])
        n_steps, n_episodes = sum(each[2] for each in windows), sum(each[3] for each in windows)
        episodes = steps * n_episodes / n_steps if n_episodes else None  # of all windows: few end
        loads = env.worker_loads() if isinstance(env, ParallelEnv) else []
        sizes = [load.rss_mb for load in loads if load.rss_mb is not None]
        return Cell(mode, n_envs, steps, episodes, cores, max(sizes) if sizes else None)
    finally:
        env.close()


def _window(
    env: SerialEnv | ParallelEnv, actions: Any, seconds: float
) -> tuple[float, float | None, int, int]:
    """Steps per second, cores, and the numbers of steps and episodes."""
    pids = [os.getpid(), *(env.worker_pids if isinstance(env, ParallelEnv) else ())]
    before = [_cpu_seconds(pid) for pid in pids]
    n_steps = n_episodes = 0
    begin = now = time.perf_counter()
    while now - begin < seconds:
        _, _, terminated, truncated, _ = env.step(next(actions))
        n_steps += env.num_envs
        n_episodes += int(np.count_nonzero(terminated | truncated))
        now = time.perf_counter()
    after = [_cpu_seconds(pid) for pid in pids]
    seconds = now - begin
    cores = None if None in (*before, *after) else (sum(after) - sum(before)) / seconds  # type: ignore[arg-type]
    return n_steps / seconds, cores, n_steps, n_episodes


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(name: str, cells: list[Cell]) -> None:
    print(f"\n## {name}\n")
    print("| envs | mode | env steps/s | relative | episodes/s | CPU, cores | MB per worker |")
    print("|---|---|---|---|---|---|---|")
    one = cells[0].steps  # the first mode with the first number of envs
    for cell in sorted(cells, key=lambda cell: cell.n_envs):
        cores = "" if cell.cores is None else f"{cell.cores:.2f}"
        episodes = "" if cell.episodes is None else f"{cell.episodes:,.1f}"
        size = "" if cell.worker_mb is None else f"{cell.worker_mb:.0f}"
        print(
            f"| {cell.n_envs} | {cell.mode} | {cell.steps:,.0f} | {cell.steps / one:.2f}x "
            f"| {episodes} | {cores} | {size} |"
        )


def recommended(cells: list[Cell]) -> Cell:
    """The fewest envs that are nearly as fast as the fastest cell; of these the fastest mode."""
    best = max(cell.steps for cell in cells)
    near = [cell for cell in cells if cell.steps >= NEARLY * best]
    fewest = min(cell.n_envs for cell in near)
    return max((cell for cell in near if cell.n_envs == fewest), key=lambda cell: cell.steps)


def draw(results: dict[str, list[Cell]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(results), 3.0))
    for place, (name, cells) in enumerate(results.items(), start=1):
        axes = figure.add_subplot(1, len(results), place)
        for mode in dict.fromkeys(cell.mode for cell in cells):
            points = sorted((cell.n_envs, cell.steps) for cell in cells if cell.mode == mode)
            axes.plot(*zip(*points, strict=True), marker="o", label=mode)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts := sorted({cell.n_envs for cell in cells}), [str(n) for n in counts])
        axes.set_ylim(bottom=0)
        axes.set_title(name)
        axes.set_xlabel("envs")
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.set_ylabel("env steps/s")
            axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"\nsaved {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", nargs="+", default=list(ENVS), help="presets of conf/env")
    parser.add_argument("--n-envs", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=0.4, help="of a window")
    parser.add_argument("--rounds", type=int, default=5, help="windows per measurement")
    parser.add_argument("--picture", type=Path, default=Path("scaling.png"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{date.today()}, {platform.machine()}, {available_cores()} cores, load {load:.1f} before"
    )
    results: dict[str, list[Cell]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.envs:
            try:
                make = env_factory(name, Path(folder))
                make().close()
            except UserError as error:
                print(f"\nskipped {name}: {error}")
                continue
            pairs = itertools.product(options.modes, options.n_envs)
            results[name] = [measured(make, mode, n_envs, options) for mode, n_envs in pairs]
            show(name, results[name])
    if not results:
        raise SystemExit("no env was measured")
    print("\n## Recommended for this machine\n")
    for name, cells in results.items():
        cell = recommended(cells)
        words = f"env={name} n_envs={cell.n_envs} vec_env={cell.mode}"
        print(f"{name}: {words}   ({cell.steps:,.0f} steps/s)")
    draw(results, options.picture)


if __name__ == "__main__":
    main()
