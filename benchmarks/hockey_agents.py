"""Trained hockey agents against the scripted players: win rates and learning curves.

    python benchmarks/hockey_agents.py "PPO, self-play=runs/TorchHockey/..." "SAC=runs/Hockey/..."
    python benchmarks/hockey_agents.py --draw      # only the chart, from the JSON

Every agent plays 1,000 greedy games against weak and against strong, in our hockey and in the
package hockey-env, half of them on each side. The games in hockey-env are skipped if the package
is missing. The curves come from the runs' metrics. Results go to
benchmarks/results/hockey.json, one entry per label, and the chart to docs/hockey.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline.analysis.statistics import wilson
from ml_pipeline.assembly.players import chosen_env, load_player, open_arena
from ml_pipeline.extras import MissingExtraError
from ml_pipeline.games.matches import play_games
from ml_pipeline.seeding import stream_seed

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "hockey.json"
CHART = REPOSITORY / "docs" / "hockey.png"
ENVS = ("hockey", "real_hockey")
OPPONENTS = ("weak", "strong")
WIN_RATES = ("opponents/weak_win_rate", "opponents/strong_win_rate")  # of self-play
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
    """How the run was trained, and its curves."""
    summary = json.loads((run / "summary.json").read_text())
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        "command": re.sub(r"(init_from|run_root)=\S+", r"\1=...", summary["commands"][0]),
        "env_steps": summary["env_steps"],
        "train_seconds": round(summary["train_seconds"]),
        "curves": {key: curve for key in (*WIN_RATES, RESULT) if (curve := thinned(rows, key))},
    }


def thinned(rows: list[dict[str, str]], key: str) -> list[list[float]]:
    """About 60 pairs of env steps and values, close together at the beginning."""
    pairs = [[int(float(row["env_steps"])), float(row[key])] for row in rows if row.get(key)]
    if not pairs:
        return []
    wanted = np.geomspace(1, len(pairs), 60).round().astype(int) - 1
    return [[steps, round(value, 3)] for steps, value in (pairs[i] for i in np.unique(wanted))]


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

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for label, result in results.items():
        seconds = f"{result['train_seconds']} s"
        curves = result["curves"]
        rates = [key for key in WIN_RATES if key in curves]
        for key in rates or [RESULT]:
            steps, values = zip(*curves[key], strict=True)
            opponent = f", {key.split('/')[1].split('_')[0]}" if rates else ""
            panels[0 if rates else 1].plot(steps, values, label=f"{label}{opponent} ({seconds})")
    panels[0].set_title("Self-play, against the scripted players", fontsize=10)
    panels[1].set_title("Curriculum, evaluations", fontsize=10)
    panels[0].set_ylabel("win rate in training")
    panels[1].set_ylabel("mean result of 50 greedy games\n(1 win, 0 draw, -1 loss)")
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xlabel("env steps")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=8, frameon=False)
    figure.savefig(CHART, dpi=120)


if __name__ == "__main__":
    main()
