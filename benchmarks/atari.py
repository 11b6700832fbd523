"""Learning curves of long Atari trainings, from their run folders.

    python benchmarks/atari.py runs/ALE/Pong-v5/... --machine "x86_64, 16 cores, H200"

Adds one entry per run to benchmarks/results/atari.json, in the place of an older one of the same
experiment and seed. Prints the curve as rows of a table. A training may have stopped early.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_pipeline.runs.loggers import read_metrics

RESULTS = Path(__file__).resolve().parent / "results" / "atari.json"
EVERY = 250_000  # env steps between two points
CURVE = "env_steps and mean return of the last 100 games"
GREEDY = "greedy return in evaluations during training"

Point = tuple[int, float]


def entry(run: Path, machine: str) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    command = summary["commands"][0]  # the later ones resume it
    experiment = re.search(r"\bexperiment=(\w+)", command)
    rows = read_metrics(run / "metrics.csv")
    curve = points(rows, "rollout/episode_return_mean_100")
    if not curve:
        raise SystemExit(f"{run} has no finished game yet")
    return {
        "experiment": experiment[1] if experiment else summary["env"],
        "seed": summary["seed"],
        "command": command,
        "stopped_at": int(rows[-1]["env_steps"]),
        CURVE: spread(curve),
        GREEDY: points(rows, "eval/episode_return"),
        "git_commit": summary["git_commit"],  # if the run was resumed: of the last part
        "date": summary["started"][:10],
        "machine": machine,
    }


def points(rows: Sequence[dict[str, str]], metric: str) -> list[Point]:
    """Env steps and value, where the metric was logged."""
    return [
        (int(row["env_steps"]), round(float(row[metric]), 2)) for row in rows if row.get(metric)
    ]


def spread(curve: Sequence[Point]) -> list[Point]:
    """The first point after each multiple of ``EVERY``, and the last point."""
    kept: list[Point] = []
    for point in curve:
        if not kept or point[0] // EVERY > kept[-1][0] // EVERY:
            kept.append(point)
    return kept if not kept or kept[-1] == curve[-1] else [*kept, curve[-1]]


def written(results: Sequence[dict[str, Any]]) -> str:
    """JSON with each point on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[\s+(-?[\d.e]+),\s+(-?[\d.e]+)\s+\]", r"[\1, \2]", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--machine", required=True, help="cores and GPU, and what else ran on it")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    for run in args.runs:
        if not (run / "summary.json").is_file():
            parser.error(f"{run} is not a run folder")
        new = entry(run, args.machine)
        name = new["experiment"], new["seed"]
        results = [each for each in results if (each["experiment"], each["seed"]) != name]
        results.append(new)
        steps, returns = zip(*new[CURVE], strict=True)
        print(f"| env steps | {' | '.join(f'{step / 1e6:.2f}M' for step in steps)} |")
        print(f"| {new['experiment']} | {' | '.join(map(str, returns))} |")
    RESULTS.write_text(written(results))


if __name__ == "__main__":
    main()
