"""Return of the presets over seeds, compared with published figures.

    python benchmarks/learning.py --experiments cartpole pendulum --seeds 1 2 3 4 5 --jobs 2
    python benchmarks/learning.py --experiments dqn_cartpole@n_envs=1 dqn_cartpole@n_envs=32
    python benchmarks/learning.py --all --jobs 2     # hours; stop it any time, run it again
    python benchmarks/learning.py --table            # only prints the known results

Each training is one ``ml_pipeline train experiment=NAME seed=N`` in ``--out``; a stopped one is
resumed. ``NAME@KEY=VALUE,KEY=VALUE`` is a variant: the experiment with these overrides.
Then the policy plays 100 greedy episodes with seeds that training never used. The results are in
benchmarks/results/learning.json, one entry per experiment and seed; known entries do not run again.
The table shows mean and 95 % interval (Student's t) over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "learning.json"

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_STUDENT = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}


class Goal(NamedTuple):
    """The published result of an experiment."""

    figure: str  # greedy: 100 episodes after training; train: the last 100 training episodes
    published: float | None
    source: str


GOALS = {
    "cartpole": Goal("greedy", 500.0, "rl-baselines3-zoo"),
    "acrobot": Goal("greedy", -86.0, "our goal; rl-baselines3-zoo reaches -73.5 at 1M"),
    "pendulum": Goal("greedy", -172.2, "rl-baselines3-zoo"),
    "mountain_car_continuous": Goal("greedy", 88.3, "rl-baselines3-zoo, one run"),
    "lunar_lander": Goal("greedy", 242.1, "rl-baselines3-zoo"),
    "half_cheetah": Goal("train", 1442.6, "CleanRL"),
    "cartpole_memory": Goal("greedy", 500.0, "rl-baselines3-zoo, recurrent"),
    "crowded_keys": Goal("greedy", None, "maximum 32"),
    "camera_and_flag": Goal("greedy", None, "maximum 32; 16 with one input alone"),
    "lanes": Goal("greedy", None, "maximum 32; 27 with the right choice of one part alone"),
    "corridor": Goal("greedy", None, "maximum 1; 0.5 without memory"),
    "half_cheetah_tuned": Goal("greedy", 5819.1, "rl-baselines3-zoo, one run, HalfCheetah-v3"),
    "hopper": Goal("greedy", 2410.4, "rl-baselines3-zoo, one run, Hopper-v3"),
    "walker2d": Goal("greedy", 3478.8, "rl-baselines3-zoo, one run, Walker2d-v3"),
    "mujoco": Goal("greedy", None, "one set of settings for all"),
    "torch_breakout": Goal("greedy", None, "0.4 with random actions"),
    "pong": Goal("train", 21.0, "rl-baselines3-zoo, one run"),
    "breakout": Goal("train", 398.0, "rl-baselines3-zoo, one run"),
    "dqn_cartpole": Goal("greedy", 500.0, "rl-baselines3-zoo"),
    "dqn_acrobot": Goal("greedy", -76.6, "rl-baselines3-zoo"),
    "dqn_mountain_car": Goal("greedy", -100.8, "rl-baselines3-zoo"),
    "dqn_lunar_lander": Goal("greedy", 154.0, "rl-baselines3-zoo"),
    "pqn_cartpole": Goal("greedy", None, "maximum 500; twice the steps of dqn_cartpole"),
    "sac_pendulum": Goal("greedy", -157.0, "rl-baselines3-zoo"),
    "sac_half_cheetah": Goal("greedy", 11_100.0, "rl_games"),
    "sac_hopper": Goal("greedy", 3542.0, "Tianshou"),
    "sac_walker2d": Goal("greedy", 5007.0, "Tianshou"),
}

_MUJOCO = {  # Tianshou's best points after 1M steps, 10 seeds
    "HalfCheetah": 5783.9,
    "Hopper": 2609.3,
    "Walker2d": 3588.5,
    "Ant": 3258.4,
    "Humanoid": 787.1,
    "InvertedDoublePendulum": 9231.3,
}
GOALS_OF_VARIANTS = {
    f"mujoco@env.id={name}-v5": Goal("greedy", score, f"Tianshou, {name}-v3")
    for name, score in _MUJOCO.items()
}
GOALS_OF_VARIANTS["pqn_cartpole@env=acrobot"] = Goal("greedy", None, "same steps as dqn_acrobot")

VARIANTS = (
    *GOALS_OF_VARIANTS,
    "crowded_keys@agent.action_mask=none",
    "dqn_cartpole@n_envs=1",
    "dqn_cartpole@n_envs=32",
    "sac_pendulum@n_envs=1",
    "sac_pendulum@n_envs=32",
)


def parts_of(name: str) -> tuple[str, list[str]]:
    """The experiment of a name, and its overrides."""
    experiment, _, overrides = name.partition("@")
    return experiment, overrides.split(",") if overrides else []


def known_name(name: str) -> str:
    experiment, overrides = parts_of(name)
    if experiment not in GOALS or not all("=" in each for each in overrides):
        raise argparse.ArgumentTypeError(
            f"{name}: not EXPERIMENT or EXPERIMENT@KEY=VALUE; experiments: {', '.join(GOALS)}"
        )
    return name


def goal_of(name: str) -> Goal:
    return GOALS_OF_VARIANTS.get(name) or GOALS[parts_of(name)[0]]


def folder_of(out: Path, name: str, seed: int) -> Path:
    return out / name.replace("=", "_") / f"seed{seed}"  # Hydra refuses = in the path of resume=


def train(name: str, seed: int, out: Path, device: str) -> Path:
    """Train an experiment with a seed to the end, resuming a stopped run; returns its folder."""
    folder = folder_of(out, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    runs = [path.parent for path in folder.glob("runs/*/*/config.yaml")]
    experiment, overrides = parts_of(name)
    arguments = [f"experiment={experiment}", f"seed={seed}", *overrides]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text() or "{}")
        if summary.get("status") == "finished":
            return run
        if (run / "checkpoints" / "latest.pt").exists():
            arguments = [f"resume={run}"]
    command = [sys.executable, "-m", "ml_pipeline", "train", *arguments]
    if len(arguments) > 1:
        command += [f"device={device}", "logger=none"]
        if device != "cpu":
            command += ["precision=tf32"]
        elif not experiment.startswith("torch_"):  # tensor envs are a batch of their own
            command += ["vec_env=serial"]
    with (folder / "log").open("a") as log:
        subprocess.run(command, cwd=folder, env=_environment(), stdout=log, stderr=log, check=True)
    (run,) = {path.parent for path in folder.glob("runs/*/*/config.yaml")}
    return run


def measured(name: str, seed: int, run: Path) -> dict[str, Any]:
    """Evaluate a finished run."""
    script = (
        "import sys, json; from ml_pipeline.assembly.run import load_agent; "
        "from ml_pipeline.analysis.evaluate import evaluate; "
        "t = load_agent(sys.argv[1], 'latest'); "
        "e = evaluate(t.agent, t.env, n_episodes=100, seed=10**6, deterministic=True); "
        "print(json.dumps([e.mean, e.std, t.env_steps]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    mean, deviation, env_steps = json.loads(output.splitlines()[-1])
    summary = json.loads((run / "summary.json").read_text())
    return {
        "experiment": name,
        "seed": seed,
        "env_steps": env_steps,
        "greedy": mean,
        "greedy_std": deviation,
        "train": summary["mean_reward"],
        "train_seconds": summary["train_seconds"],
        "git_commit": summary["git_commit"],
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def known_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def run_all(names: Sequence[str], seeds: Sequence[int], out: Path, jobs: int, device: str) -> None:
    results, lock = known_results(), Lock()
    done = {(each["experiment"], each["seed"]) for each in results}
    todo = [(name, seed) for name in names for seed in seeds if (name, seed) not in done]

    def work(task: tuple[str, int]) -> None:
        name, seed = task
        try:
            result = measured(name, seed, train(name, seed, out, device))
        except subprocess.CalledProcessError as error:
            log = folder_of(out, name, seed) / "log"
            print(f"{name} seed {seed} failed ({error.returncode}); see {log}", flush=True)
            return
        with lock:
            results.append(result)
            results.sort(key=_order)
            RESULTS.parent.mkdir(exist_ok=True)
            temporary = RESULTS.with_suffix(".tmp")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            temporary.replace(RESULTS)
            print(f"{name} seed {seed}: {result[goal_of(name).figure]:.1f}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, todo))


def _order(result: dict[str, Any]) -> tuple[int, str, int]:
    """In the order of GOALS, each experiment before its variants."""
    name = result["experiment"]
    return list(GOALS).index(parts_of(name)[0]), name, result["seed"]


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    quantile = _STUDENT.get(len(values) - 1, 1.96)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def print_table(names: Sequence[str]) -> None:
    results = known_results()
    print("| experiment | env steps | seeds | mean ± 95 % | worst seed | published |")
    print("|---|---|---|---|---|---|")
    for name in names:
        goal = goal_of(name)
        runs = [each for each in results if each["experiment"] == name]
        if not runs:
            continue
        values = [each[goal.figure] for each in runs]
        published = "-" if goal.published is None else f"{goal.published:g}"
        what = "" if goal.figure == "greedy" else ", while training"
        mean, half = statistics.mean(values), interval(values)
        print(
            f"| {name}{what} | {runs[0]['env_steps']:,} | {len(runs)} | {mean:.1f} ± {half:.1f} | "
            f"{min(values):.1f} | {published} ({goal.source}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", nargs="+", type=known_name, default=["cartpole"])
    parser.add_argument(
        "--all", action="store_true", help="every experiment, and the variants in the docs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings")
    parser.add_argument("--device", default="cpu", help="of the training")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder for runs")
    parser.add_argument("--table", action="store_true", help="print the table only")
    args = parser.parse_args()
    names = [*GOALS, *VARIANTS] if args.all or args.table else args.experiments
    if not args.table:
        run_all(names, args.seeds, args.out.resolve(), args.jobs, args.device)
    print_table(names)


if __name__ == "__main__":
    main()
