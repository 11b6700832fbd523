"""Game Boy: cost of the env over PyBoy, speed with 1 and 2 envs, memory, reset, and a whole run.

    python benchmarks/game_boy.py                  # with the test ROM, which it assembles
    python benchmarks/game_boy.py --rom game.gb --game game.yaml --state game.state
    python benchmarks/game_boy.py --parts overhead reset

The overhead compares the CPU time of steps with that of ``tick`` over the same number of frames,
in turns, and uses the fastest of the rounds, because other programs slow both down.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.worlds.game_boy.env import OBSERVATIONS, GameBoy

REPOSITORY = Path(__file__).resolve().parents[1]
N_EMULATORS = 8  # of the worker whose memory is measured
RUN_STEPS = 20_000


def seconds_of(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def overhead(make: Callable[..., GameBoy], rounds: int, n_steps: int = 300) -> None:
    print("| observation | tick, ms | step, ms | overhead |")
    print("|---|---|---|---|")
    for observation in OBSERVATIONS:
        env = make(observation=observation, episode_length=10**9)
        env.reset(seed=1)
        pyboy, draws = env._emulator.pyboy, observation != "memory"
        random = np.random.default_rng(1)

        def steps(env: GameBoy = env, random: np.random.Generator = random) -> None:
            for action in random.integers(env.action_space.n, size=n_steps).tolist():  # type: ignore[attr-defined]
                env.step(action)

        def ticks(env: GameBoy = env, pyboy: Any = pyboy, draws: bool = draws) -> None:
            for _ in range(n_steps):
                pyboy.tick(env.frame_skip, draws, False)

        pairs = [(seconds_of(ticks), seconds_of(steps)) for _ in range(rounds)]
        tick, step = (min(each) / n_steps for each in zip(*pairs, strict=True))
        print(f"| {observation} | {1e3 * tick:.3f} | {1e3 * step:.3f} | {step / tick - 1:.1%} |")
        env.close()


def reset(make: Callable[..., GameBoy], rounds: int) -> None:
    env, times = make(), []
    for _ in range(10 * rounds):
        begin = time.perf_counter()
        env.reset()
        times.append(1e3 * (time.perf_counter() - begin))
    print(f"reset: {statistics.median(times):.1f} ms, median of {len(times)}")
    env.close()


def memory(make: Callable[..., GameBoy], rounds: int) -> None:
    del rounds
    for n_envs in (1, N_EMULATORS):
        env = ParallelEnv([make] * n_envs, seed=1, n_workers=1)
        try:
            env.reset()
            for _ in range(10):
                env.step(np.zeros(n_envs, dtype=np.int64))
            (pid,) = env.worker_pids
            rss, pss = (proc_megabytes(pid, key) for key in ("Rss:", "Pss:"))
            print(f"worker with {n_envs} emulators: RSS {rss:.1f} MB, PSS {pss:.1f} MB")
        finally:
            env.close()


def proc_megabytes(pid: int, key: str) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(f"/proc/{pid}/smaps_rollup has no {key}")


def scaling(make: Callable[..., GameBoy], rounds: int, n_steps: int = 100) -> None:
    """Steps per second of one env in this process, and of two in two processes.

    Short windows in turns, and the fastest of each: another program can take a core at any time.
    """
    kinds: dict[str, Callable[[], SerialEnv | ParallelEnv]] = {
        "1 env": lambda: SerialEnv([make], seed=1),
        "2 envs, parallel": lambda: ParallelEnv([make] * 2, seed=1, n_workers=2),
        "2 envs, shared": lambda: ParallelEnv([make] * 2, seed=1, n_workers=2, main_slice=True),
    }
    envs = {name: kind() for name, kind in kinds.items()}
    speeds: dict[str, list[float]] = {name: [] for name in envs}
    try:
        for env in envs.values():
            env.reset()
        for _ in range(10 * rounds):
            for name, env in envs.items():
                actions = np.random.default_rng(1).integers(2, size=(n_steps, env.num_envs))
                begin = time.perf_counter()
                for each in actions:
                    env.step(each)
                speeds[name].append(actions.size / (time.perf_counter() - begin))
    finally:
        for env in envs.values():
            env.close()
    print("| | steps/s, fastest | median | fastest, relative to 1 env |")
    print("|---|---|---|---|")
    one = max(speeds["1 env"])
    for name, found in speeds.items():
        fastest, median = max(found), statistics.median(found)
        print(f"| {name} | {fastest:,.0f} | {median:,.0f} | {fastest / one:.2f}x |")


def run(make: partial[GameBoy], rounds: int) -> None:
    """A whole run by train_ppo.py, with imports, checkpoints and the run folder."""
    del rounds
    files = [f"env.kwargs.{key}={value}" for key, value in make.keywords.items()]
    settings = ["env=game_boy", *files, "env.kwargs.observation=memory", "n_envs=2"]
    settings += [f"total_steps={RUN_STEPS}", "logger=none", "device=cpu", "~callbacks.evaluation"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, str(REPOSITORY / "train_ppo.py"), *settings],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{RUN_STEPS:,} steps with 2 envs, end to end: {wall:.1f} s ({cpu:.1f} s of CPU time)")


PARTS = {"overhead": overhead, "reset": reset, "memory": memory, "scaling": scaling, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rom", type=Path)
    parser.add_argument("--game", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    if (args.rom is None) != (args.game is None):
        parser.error("--rom and --game go together")
    given = {key: getattr(args, key) for key in ("rom", "game", "state")}
    files: dict[str, Any] = {
        key: str(path.resolve()) for key, path in given.items() if path is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if not files:
            roms = runpy.run_path(str(REPOSITORY / "tests" / "game_boy_roms.py"))
            files = roms["write_game"](Path(folder), "catch")
        print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores")
        for part in args.parts:
            PARTS[part](partial(GameBoy, **files), args.rounds)
        os.chdir(REPOSITORY)


if __name__ == "__main__":
    main()
