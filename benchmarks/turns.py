"""Two checkouts compared in turns: did a change make training slower?

    git worktree add ../before COMMIT
    python benchmarks/turns.py ../before . --rounds 9
    python benchmarks/turns.py ../before . --cells ppo-cartpole dqn --cores 0 2 4 6

Each cell is a training of benchmarks/ppo.py or benchmarks/off_policy.py, or a table of
benchmarks/vec_env.py, with the code of the checkout itself. Both checkouts run once per round; the
one that begins alternates. Each cell runs on cores of its own, so several cells may run at a time
if the machine has enough cores. The figure is the median over the rounds of new / old in the same
round, with the lowest and the highest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import NamedTuple

Speeds = dict[str, float]  # figure -> steps per second


class Cell(NamedTuple):
    """One measurement: a script of the folder benchmarks, its arguments, and its cores."""

    script: str
    arguments: list[str]
    n_cores: int = 1


def ppo(env_id: str, mode: str, n_cores: int = 1, **changed: object) -> Cell:
    """A training of benchmarks/ppo.py, with its settings."""
    task = f"import ppo, json; print(json.dumps(ppo.SETTINGS[{env_id!r}]))"
    folder = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, "-c", task], cwd=folder, capture_output=True, text=True, check=True
    )
    setting = json.loads(found.stdout) | changed
    return Cell("ppo.py", ["--worker", json.dumps(["ours", env_id, setting, 1, mode])], n_cores)


def off_policy(name: str, *task: object) -> Cell:
    """A training of benchmarks/off_policy.py."""
    return Cell("off_policy.py", ["--worker", json.dumps([name, task, "ours", 1])])


def vec_env(env: str) -> Cell:
    """The table of benchmarks/vec_env.py."""
    return Cell("vec_env.py", ["speed", "--envs", env, "--repeats", "9"], n_cores=2)


def cells() -> dict[str, Cell]:
    return {
        "ppo-cartpole": ppo("CartPole-v1", "serial"),
        "ppo-cartpole-shared": ppo("CartPole-v1", "shared", n_cores=2),
        "ppo-halfcheetah": ppo("HalfCheetah-v5", "serial", steps=24_576),
        "dqn": off_policy("dqn", "CartPole-v1", 256, 64, 1_000, 0.5, 12_000),
        "sac": off_policy("sac", "Pendulum-v1", 256, 256, 500, 1.0, 2_000),
        "vec-cartpole": vec_env("CartPole-v1"),
        "vec-100us": vec_env("synth:100us"),
    }


def measure(checkout: Path, cell: Cell, cores: list[int]) -> Speeds:
    """The speeds that one process of ``checkout`` reports."""
    script = checkout.resolve() / "benchmarks" / cell.script
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(script), *cell.arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{script} failed:\n{output}")
    if cell.script == "vec_env.py":
        return table(output)
    result = json.loads(output.splitlines()[-1])
    if cell.script == "ppo.py":
        steps = json.loads(cell.arguments[-1])[2]["steps"]
        per_cpu_second = steps / (usage.ru_utime + usage.ru_stime)
        return {"wall": result["steps_per_second"], "CPU, whole process": per_cpu_second}
    return {"wall": result["speed"] if "speed" in result else next(iter(result.values()))}


def table(output: str) -> Speeds:
    """Our rows of the table of vec_env.py, as shares of the limit measured beside them."""
    speeds = {}
    for line in output.splitlines():
        words = line.rsplit(None, 3)
        if len(words) == 4 and words[0].strip() in ("serial", "parallel", "shared"):
            speeds[f"{words[0].strip()}, of the limit"] = float(words[2])
    return speeds


def compare(old: Path, new: Path, cell: Cell, cores: list[int], rounds: int) -> list[list[Speeds]]:
    """[round][0 old, 1 new]."""
    found = []
    for number in range(rounds):
        order = [(0, old), (1, new)]
        speeds: list[Speeds] = [{}, {}]
        for place, checkout in order if number % 2 == 0 else order[::-1]:
            speeds[place] = measure(checkout, cell, cores)
        found.append(speeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = cells()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--cells", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cores", nargs="+", type=int, default=sorted(os.sched_getaffinity(0)), help="to run on"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    args = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, cores {args.cores}, {args.rounds} rounds")
    free, waves = list(args.cores), [[]]  # type: tuple[list[int], list[list[tuple[str, list[int]]]]]
    for name in args.cells:
        n_cores = known[name].n_cores
        if n_cores > len(args.cores):
            raise SystemExit(f"{name} needs {n_cores} cores; --cores has {len(args.cores)}")
        if n_cores > len(free):
            free, waves = list(args.cores), [*waves, []]
        waves[-1].append((name, free[:n_cores]))
        free = free[n_cores:]
    found = {}
    print("| cell | figure | old | new | new / old |")
    print("|---|---|---|---|---|")
    for wave in waves:
        with ThreadPoolExecutor(len(wave)) as pool:
            running = {
                name: pool.submit(compare, args.old, args.new, known[name], cores, args.rounds)
                for name, cores in wave
            }
        for name, future in running.items():
            found[name] = future.result()
            for figure in found[name][0][0]:
                before, after = ([speeds[i][figure] for speeds in found[name]] for i in (0, 1))
                ratios = [b / a for a, b in zip(before, after, strict=True)]
                print(
                    f"| {name} | {figure} | {statistics.median(before):,.2f} "
                    f"| {statistics.median(after):,.2f} | {statistics.median(ratios):.3f} "
                    f"({min(ratios):.2f}-{max(ratios):.2f}) |",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
