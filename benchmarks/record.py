r"""Cost of reading run folders: CPU seconds and memory of ``runs`` and ``compare``.

    python benchmarks/record.py --listed 500 --compared 100 --rows 5000 \
        --out benchmarks/results/record.json

The run folders are made up: the default config, and a metrics.csv with the columns of a PPO run.
Each command runs ``--rounds`` times, each in a process of its own; the least of them is printed.
An idle Python is measured in the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ml_pipeline.assembly.compose import checked_config, compose_config, stored_text
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.run_folder import RunFolder

_STEPS_PER_ROW = 1024
_ROWS_PER_EVALUATION = 10
_N_OTHER_COLUMNS = 20
_MEASURED = """
import sys
code = 0
if sys.argv[1:]:
    from ml_pipeline.__main__ import main
    code = main()
import json, resource
used = resource.getrusage(resource.RUSAGE_SELF)
megabytes = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
if sys.platform == "linux":  # there ru_maxrss also counts the parent, which started this process
    (peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    megabytes = int(peak.split()[1]) / 2**10
print(json.dumps([used.ru_utime + used.ru_stime, megabytes]), file=sys.stderr)
sys.exit(code)
"""


class Cost(NamedTuple):
    """What one command used."""

    cpu_seconds: float
    peak_megabytes: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--listed", type=int, default=500, help="run folders for runs")
    parser.add_argument("--compared", type=int, default=100, help="run folders for compare")
    parser.add_argument("--rows", type=int, default=5000, help="of each metrics.csv of compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file of the raw results")
    options = parser.parse_args()
    out = options.out and options.out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_runs(Path("listed"), options.listed, n_rows=1)
        make_runs(Path("compared"), options.compared, n_rows=options.rows)
        compared = [str(path) for path in Path("compared").glob("*/*")]
        commands = {
            "idle Python": [],
            f"runs, {options.listed} folders": ["runs", "--root", "listed"],
            f"compare, {options.compared} runs of {options.rows:,} rows": ["compare", *compared],
        }
        results = {
            title: [measured(arguments) for _ in range(options.rounds)]
            for title, arguments in commands.items()
        }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{date.today()}, {machine}")
    for title, rounds in results.items():
        cost = min(rounds)
        print(f"{title}: {cost.cpu_seconds:.2f} CPU s, {cost.peak_megabytes:,.0f} MB")
    if out is not None:
        raw = {title: [cost._asdict() for cost in rounds] for title, rounds in results.items()}
        facts = {"date": str(date.today()), "machine": machine, "results": raw}
        out.write_text(json.dumps(facts, indent=1) + "\n")


def make_runs(root: Path, n_runs: int, *, n_rows: int) -> None:
    """Half of the runs have another learning rate; each pair has a seed of its own."""
    random = np.random.default_rng(0)
    configs = [
        checked_config(compose_config([f"agent.learning_rate={rate}", "logger=none"]))
        for rate in (1e-3, 1e-4)
    ]
    for number in range(n_runs):
        run = RunFolder(root / "CartPole-v1" / f"2026-11-15_12-00-00_{number:04x}")
        run.make()
        config = dataclasses.replace(configs[number % 2], seed=number // 2)
        run.config.write_text(stored_text(config))
        write_metrics(run.metrics, random, n_rows)
        summary = {"env": "CartPole-v1", "status": "finished", "seconds": 1.5, "env_steps": 1024}
        run.update_summary({**summary, "started": "2026-11-15T12:00:00+01:00"})


def write_metrics(path: Path, random: np.random.Generator, n_rows: int) -> None:
    others = [f"loss/part_{number}" for number in range(_N_OTHER_COLUMNS)]
    names = ["env_steps", *others, MEAN_RETURN, "time/iteration_seconds", EVAL_RETURN]
    lines = [",".join(names)]
    for row, values in enumerate(random.random((n_rows, len(names) - 1)).tolist(), start=1):
        cells = [str(value) for value in values]
        if row % _ROWS_PER_EVALUATION and row != n_rows:
            cells[-1] = ""
        lines.append(",".join([str(row * _STEPS_PER_ROW), *cells]))
    path.write_text("\n".join(lines) + "\n")


def measured(arguments: list[str]) -> Cost:
    """Run a command of ml_pipeline, or nothing if there are no arguments."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *arguments], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    seconds, memory = json.loads(done.stderr.splitlines()[-1])
    return Cost(round(seconds, 3), round(memory, 1))


if __name__ == "__main__":
    main()
