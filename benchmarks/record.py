"""Cost of reading run folders: CPU seconds and memory of ``runs`` and ``compare``.

    python benchmarks/record.py --listed 500 --compared 100 --rows 5000

The run folders are made up: the default config, and a metrics.csv with the columns of a PPO run.
Each command runs once in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ml_pipeline.assembly.compose import checked_config, compose_config, stored_text
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.run_folder import RunFolder

_STEPS_PER_ROW = 1024
_ROWS_PER_EVALUATION = 10
_N_OTHER_COLUMNS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--listed", type=int, default=500, help="run folders for runs")
    parser.add_argument("--compared", type=int, default=100, help="run folders for compare")
    parser.add_argument("--rows", type=int, default=5000, help="of each metrics.csv of compare")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_runs(Path("listed"), options.listed, n_rows=1)
        make_runs(Path("compared"), options.compared, n_rows=options.rows)
        report(f"runs, {options.listed} folders", ["runs", "--root", "listed"])
        folders = [str(path) for path in Path("compared").glob("*/*")]
        title = f"compare, {options.compared} runs of {options.rows:,} rows"
        report(title, ["compare", *folders])


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


def report(title: str, arguments: list[str]) -> None:
    """Run a command of ml_pipeline and print its CPU time and its largest memory."""
    code = (
        "import json, resource, sys; from ml_pipeline.__main__ import main; code = main(); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    exit_code, seconds, memory = json.loads(done.stderr.splitlines()[-1])
    if exit_code:
        raise SystemExit(done.stderr)
    megabytes = memory / (2**20 if sys.platform == "darwin" else 2**10)
    print(f"{title}: {seconds:.2f} CPU s, {megabytes:,.0f} MB")


if __name__ == "__main__":
    main()
