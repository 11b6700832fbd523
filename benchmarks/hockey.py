"""Trained hockey agents against the scripted players: win rates and learning curves.

    python benchmarks/hockey.py "PPO, self-play=runs/TorchHockey/..." "SAC=runs/Hockey/..."
    python benchmarks/hockey.py --draw      # only the chart, from the JSON

Every agent plays 1,000 greedy games against weak and against strong, in our hockey and in the
package hockey-env, half of them on each side. The games in hockey-env are skipped if the package
is missing. The curves come from the runs' own evaluations. Results go to
benchmarks/results/hockey.json, one entry per label, and the chart to docs/hockey.png.
"""

from __future__ import annotations

import argparse
import csv
import json
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from ml_pipeline.analysis.games import play_games
from ml_pipeline.analysis.statistics import wilson
from ml_pipeline.door.players import chosen_env, load_player, open_arena
from ml_pipeline.extras import MissingExtraError
from ml_pipeline.seeding import stream_seed

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "hockey.json"
CHART = REPOSITORY / "docs" / "hockey.png"
ENVS = ("hockey", "real_hockey")
OPPONENTS = ("weak", "strong")
RESULT = "eval/info/winner"  # mean over evaluation games: 1 win, 0 draw, -1 loss
N_ENVS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="LABEL=RUN")
    parser.add_argument("--games", type=int, default=1_000)
    parser.add_argument("--draw", action="store_true", help="only the chart")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for word in options.runs:
        label, separator, run = word.partition("=")
        if not separator:
            parser.error(f"{word}: write LABEL=RUN")
        results[label] = {
            "date": date.today().isoformat(),
            **of_run(Path(run)),
            "games": {env: of_env(run, env, options.games) for env in ENVS},
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if not options.runs and not options.draw:
        parser.error("name a run as LABEL=RUN, or --draw")
    draw(results)
    print(f"{RESULTS.relative_to(REPOSITORY)}, {CHART.relative_to(REPOSITORY)}")


def of_run(run: Path) -> dict[str, Any]:
    """How the run was trained, and its evaluations."""
    summary = json.loads((run / "summary.json").read_text())
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(RESULT)]
    return {
        "command": summary["commands"][0],
        "env_steps": summary["env_steps"],
        "train_seconds": round(summary["train_seconds"]),
        "curve": [[int(float(row["env_steps"])), round(float(row[RESULT]), 3)] for row in rows],
    }


def of_env(run: str, env: str, n_games: int) -> dict[str, Any] | str:
    """Wins, draws and losses against each scripted player."""
    try:
        arena = open_arena(chosen_env(env))
    except MissingExtraError as error:
        return str(error)
    counts = {}
    for opponent in OPPONENTS:
        first = load_player(run, arena, noise_seed=0)
        second = load_player(opponent, arena, noise_seed=1)
        with closing(arena.make_envs(n_envs=N_ENVS)) as envs:
            games = play_games(
                first.policy,
                second.policy,
                envs,
                n_games=n_games,
                seed=stream_seed(0, "games"),
                deterministic=True,
            ).counts
        low, high = (float(each) for each in wilson(games.wins, games.n_games)[1:])
        print(
            f"{run} in {env} against {opponent}: {games.wins} wins ({low:.1%} to {high:.1%}), "
            f"{games.draws} draws, {games.losses} losses",
            flush=True,
        )
        counts[opponent] = {**games._asdict(), "interval": [round(low, 4), round(high, 4)]}
    return counts


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for label, result in results.items():
        steps, values = zip(*result["curve"], strict=True)
        axes.plot(steps, values, marker=".", label=f"{label} ({result['train_seconds']} s)")
    axes.set_xscale("log")
    axes.set_xlabel("env steps")
    axes.set_ylabel("mean result of 50 greedy games\n(1 win, 0 draw, -1 loss)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(CHART, dpi=120)


if __name__ == "__main__":
    main()
