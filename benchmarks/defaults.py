"""The defaults of PPO, DQN and SAC on tasks that they were not chosen for, beside those of others.

    python benchmarks/defaults.py --jobs 2           # trains what is not known yet; hours
    python benchmarks/defaults.py --algorithms ppo --tasks CartPole-v1 Hopper-v5 --seeds 1 2 3
    python benchmarks/defaults.py --table            # only prints the known results

``ours`` changes no setting. ``SB3`` and ``CleanRL`` are the defaults of stable-baselines3 2.9 and
of CleanRL's scripts, written as settings of ours: one implementation, so that only the defaults
differ (its numbers equal SB3's, see sb3_numbers.py). Two settings of CleanRL are missing here: the
squared error in DQN and the rate of 1e-3 for SAC's critics. Every run has the same steps; then the
last policy plays 20 greedy episodes. Results are in benchmarks/results/defaults.json, an entry per
task, setting and seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ideas import origin, train_all

RESULTS = Path(__file__).resolve().parent / "results" / "defaults.json"
SEEDS = (1, 2, 3, 4, 5)
_COMMON = ["device=cpu", "logger=none", "vec_env=serial", "~callbacks.evaluation"]

# Env steps by task; DQN takes the discrete ones, SAC the others.
DISCRETE = {"CartPole-v1": 100_000, "Acrobot-v1": 100_000, "MountainCar-v0": 100_000}
CONTINUOUS = {
    "Pendulum-v1": 100_000,
    "MountainCarContinuous-v0": 100_000,
    "InvertedDoublePendulum-v5": 300_000,
    "HalfCheetah-v5": 300_000,
    "Hopper-v5": 300_000,
    "Walker2d-v5": 300_000,
    "Ant-v5": 300_000,
}
_SAC_STEPS = 100_000  # at most: each env step has an update of three networks


class Defaults(NamedTuple):
    """Settings of ours that equal the defaults of another library."""

    discrete: Sequence[str]
    continuous: Sequence[str]


_PPO_OF_SB3 = [
    *("n_envs=1", "agent.n_steps=2048", "agent.n_minibatches=32", "agent.n_epochs=10"),
    *("agent.learning_rate=3e-4", "agent.learning_rate_schedule=constant", "agent.value_coef=1.0"),
    *("agent.entropy_coef=0.0", "agent.box_policy=gaussian", "agent.normalize_obs=false"),
    *("agent.scale_reward=false", "agent.clip_value_loss=false", "network=mlp"),
]
_PPO_OF_CLEANRL = [
    *("agent.learning_rate_schedule=linear", "agent.value_coef=0.5", "agent.clip_value_loss=true"),
    *("agent.box_policy=gaussian", "network=mlp"),
]
_DQN = [
    *("n_envs=1", "agent.double=false", "agent.duelling=false", "network=mlp"),
    *("network.activation=relu", "agent.iteration_length=256"),
]
_SAC = [
    *("n_envs=1", "agent.iteration_length=256", "network=mlp", "network.activation=relu"),
    *("network.hidden_sizes=[256,256]", "agent.buffer_size=1e6", "agent.learning_rate=3e-4"),
]
SETTINGS: dict[str, dict[str, Defaults]] = {
    "ppo": {
        "ours": Defaults([], []),
        "SB3": Defaults(_PPO_OF_SB3, _PPO_OF_SB3),
        "CleanRL": Defaults(
            [
                *_PPO_OF_CLEANRL,
                *("n_envs=4", "agent.n_steps=128", "agent.n_minibatches=4", "agent.n_epochs=4"),
                *("agent.learning_rate=2.5e-4", "agent.entropy_coef=0.01"),
            ],
            [
                *_PPO_OF_CLEANRL,
                *("n_envs=1", "agent.n_steps=2048", "agent.n_minibatches=32"),
                *("agent.n_epochs=10", "agent.learning_rate=3e-4", "agent.entropy_coef=0.0"),
                *("agent.normalize_obs=true", "agent.scale_reward=true"),
            ],
        ),
    },
    "dqn": {
        "ours": Defaults([], []),
        "SB3": Defaults(
            [
                *_DQN,
                *("agent.learning_rate=1e-4", "agent.buffer_size=1e6", "agent.batch_size=32"),
                *("agent.learning_starts=100", "agent.updates_per_env_step=0.25"),
                # In gradient steps: SB3 copies every 10,000 env steps.
                *("agent.target_every=2500", "agent.epsilon_share=0.1"),
            ],
            [],
        ),
        "CleanRL": Defaults(
            [
                *_DQN,
                *("agent.learning_rate=2.5e-4", "agent.buffer_size=1e4", "agent.batch_size=128"),
                *("agent.learning_starts=1e4", "agent.updates_per_env_step=0.1"),
                *("agent.target_every=50", "agent.epsilon_share=0.5", "agent.max_grad_norm=null"),
                "network.hidden_sizes=[120,84]",
            ],
            [],
        ),
    },
    "sac": {
        "ours": Defaults([], []),
        "SB3": Defaults([], [*_SAC, "agent.learning_starts=100"]),
        "CleanRL": Defaults([], [*_SAC, "agent.learning_starts=5e3", "agent.policy_delay=2"]),
    },
}


def steps_of(algorithm: str) -> dict[str, int]:
    """The tasks of an algorithm, with their env steps."""
    if algorithm == "dqn":
        return DISCRETE
    if algorithm == "sac":
        return {task: min(steps, _SAC_STEPS) for task, steps in CONTINUOUS.items()}
    return DISCRETE | CONTINUOUS


def words_of(algorithm: str, task: str, name: str) -> list[str]:
    """The command line of a training."""
    settings = SETTINGS[algorithm][name]
    chosen = settings.discrete if task in DISCRETE else settings.continuous
    steps = steps_of(algorithm)[task]
    door = [] if algorithm == "ppo" else [f"agent={algorithm}"]
    return [*door, f"env.id={task}", f"total_steps={steps}", *_COMMON, *chosen]


def known_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def run_all(
    algorithms: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], jobs: int
) -> None:
    results = known_results()
    done = {(each["settings"], each["seed"]) for each in results}
    todo, places = {}, {}
    for seed in seeds:
        for algorithm in algorithms:
            for task in steps_of(algorithm):
                for name in SETTINGS[algorithm]:
                    words = words_of(algorithm, task, name)
                    key = " ".join(words), seed
                    if task in tasks and key not in done:
                        todo[key] = words
                        places[key] = {"algorithm": algorithm, "task": task, "defaults": name}

    for key, measured in train_all(todo, jobs):
        text, seed = key
        result = {**places[key], "seed": seed, "settings": text, **measured, **origin(jobs)}
        results.append(result)
        results.sort(key=lambda each: (each["settings"], each["seed"]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{' '.join(places[key].values())} {seed}: {result['greedy']:.1f}", flush=True)


def table() -> str:
    """IQM with interval for each task and each library's defaults."""
    from ml_pipeline.analysis.statistics import iqm_with_interval

    results = known_results()
    names = list(SETTINGS["ppo"])
    lines = [
        f"| algorithm, task | {' | '.join(names)} | seeds |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for algorithm in SETTINGS:
        for task, steps in steps_of(algorithm).items():
            cells, counts = [], []
            for name in names:
                text = " ".join(words_of(algorithm, task, name))
                scores = [each["greedy"] for each in results if each["settings"] == text]
                counts.append(str(len(scores)))
                if len(scores) < 2:
                    cells.append("-" if not scores else f"{scores[0]:.0f}")
                    continue
                iqm = iqm_with_interval(np.array(scores))
                cells.append(f"{iqm.value:.0f} ({iqm.low:.0f} to {iqm.high:.0f})")
            if set(counts) != {"0"}:
                row = f"{algorithm}, {task}, {steps:,} steps"
                lines.append(f"| {row} | {' | '.join(cells)} | {'/'.join(counts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(DISCRETE | CONTINUOUS)
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings")
    parser.add_argument("--table", action="store_true", help="only print the known results")
    args = parser.parse_args()
    if not args.table:
        run_all(args.algorithms, args.tasks, args.seeds, args.jobs)
    print(table())


if __name__ == "__main__":
    main()
