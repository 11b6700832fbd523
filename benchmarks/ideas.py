"""Evidence for an idea: off and on, over seeds and tasks, written to docs/ideas/NAME.md.

    python benchmarks/ideas.py rpo muon --jobs 2     # trains what is not known yet
    python benchmarks/ideas.py --all --pages         # only writes the pages, from ideas.json

Each training is one ``ml_pipeline train``; then its last policy plays 20 greedy episodes that
training never saw. Results are in benchmarks/results/ideas.json, an entry per task, setting and
seed. Off and on have the same seeds and run in turn, so the times of a page compare one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "ideas.json"
PAGES = REPOSITORY / "docs" / "ideas"
SEEDS = (1, 2, 3, 4, 5)
_FEWEST_SEEDS = 3  # of a task, for a row of the page
_IDEAS = "ml_pipeline.algorithms.ppo.ideas"
_COMMON = ["device=cpu", "logger=none", "vec_env=serial", "~callbacks.evaluation"]

TASKS: dict[str, list[str]] = {
    "Pendulum-v1": ["experiment=pendulum", "total_steps=60_000", "agent.box_policy=gaussian"],
    "Acrobot-v1": ["experiment=acrobot", "total_steps=100_000"],
    "HalfCheetah-v5": [
        *("experiment=mujoco", "env.id=HalfCheetah-v5", "total_steps=150_000"),
        "agent.recompute_advantages=false",
    ],
    "CartPole-v1": ["experiment=cartpole", "total_steps=50_000"],
    "MountainCar-v0": ["env=mountain_car", "n_envs=16", "total_steps=300_000", "agent.n_epochs=4"],
    "MountainCarContinuous-v0": ["env=mountain_car_continuous", "n_envs=16", "total_steps=300_000"],
}
_BLIND = "env.wrappers.critic._target_=ml_pipeline.envs.wrappers.for_critic.ForCritic"
_POSITIONS = {"CartPole-v1": "[1,3]", "Pendulum-v1": "[2]", "Acrobot-v1": "[4,5]"}
GENERAL = ("Pendulum-v1", "Acrobot-v1", "HalfCheetah-v5")


class Idea(NamedTuple):
    """What a page says, and how to switch the idea on; keyed settings differ by task."""

    title: str
    paper: str
    what: str
    tasks: tuple[str, ...]
    on: Mapping[str, list[str]]  # by task; "" for all
    off: Mapping[str, list[str]] = MappingProxyType({})


def blind(task: str, *more: str) -> list[str]:
    return [f"+{_BLIND}", f"+env.wrappers.critic.hidden={_POSITIONS[task]}", *more]


def mirrored(task: str) -> list[str]:
    functions = {"CartPole-v1": "cartpole", "Pendulum-v1": "pendulum", "Acrobot-v1": "acrobot"}
    return [
        f"agent.loss._target_={_IDEAS}.symmetry.symmetric_loss",
        f"agent.loss.mirror_obs=mirrors.{functions[task]}_obs",
        f"agent.loss.mirror_action=mirrors.{functions[task]}_action",
    ]


IDEAS = {
    "rpo": Idea(
        "Robust policy optimisation",
        "Rahman and Xue, 2022, arXiv:2212.07536",
        "Uniform noise is added to the policy's means in every gradient step, so that the policy "
        "does not become certain too early.",
        GENERAL,
        {"": [f"agent.loss._target_={_IDEAS}.rpo.rpo_loss"]},
    ),
    "recomputed_advantages": Idea(
        "Advantages computed again before each epoch",
        "Andrychowicz et al., 2021, arXiv:2006.05990, section 3.5",
        "After an epoch the critic knows more than during the rollout. Advantages and value "
        "targets are computed again with it; the old probabilities stay.",
        GENERAL,
        {"": ["agent.recompute_advantages=true"]},
    ),
    "layer_norm": Idea(
        "Layer norm and weight decay",
        "Lyle et al., 2023, arXiv:2303.01486",
        "The inputs of every activation are normalised, and AdamW shrinks the weights. Both are "
        "said to keep networks able to learn; `ideas.plasticity.Plasticity` measures that.",
        GENERAL,
        {
            "": [
                *("network=mlp", "network.layer_norm=true"),
                *("agent.optimizer._target_=torch.optim.AdamW", "agent.optimizer.eps=1e-5"),
                "agent.optimizer.weight_decay=0.01",
            ]
        },
    ),
    "muon": Idea(
        "Muon",
        "Jordan et al., 2024, kellerjordan.github.io/posts/muon",
        "The update of each hidden matrix is made orthogonal; all other parameters use AdamW.",
        GENERAL,
        {"": [f"agent.optimizer._target_={_IDEAS}.muon.Muon"]},
    ),
    "symmetry": Idea(
        "Symmetry",
        "Mittal et al., 2024, arXiv:2403.04359",
        "Each minibatch is joined by its mirror image, which two functions of the user make.",
        ("Pendulum-v1", "Acrobot-v1", "CartPole-v1"),
        {task: mirrored(task) for task in ("Pendulum-v1", "Acrobot-v1", "CartPole-v1")},
    ),
    "asymmetric_critic": Idea(
        "A critic that sees more than the actor",
        "Pinto et al., 2017, arXiv:1710.06542",
        "The actor sees positions only; the critic also sees the velocities, which only training "
        "has. `off` is a critic as blind as the actor.",
        tuple(_POSITIONS),
        {task: blind(task, "+agent.obs_groups.actor=[obs]") for task in _POSITIONS},
        {
            task: blind(task, "+agent.obs_groups.actor=[obs]", "+agent.obs_groups.critic=[obs]")
            for task in _POSITIONS
        },
    ),
    "rnd": Idea(
        "Random network distillation",
        "Burda et al., 2018, arXiv:1810.12894",
        "A bonus for observations that a network cannot predict yet, because they are new.",
        ("MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"),
        {"": [f"agent.on_rollout._target_={_IDEAS}.rnd.RND"]},
    ),
}


def settings(idea: Idea, task: str, *, is_on: bool) -> list[str]:
    chosen = idea.on if is_on else idea.off
    return [*TASKS[task], *_COMMON, *chosen.get(task, chosen.get("", []))]


def train(words: Sequence[str], seed: int) -> dict[str, Any]:
    """Train in a folder of its own and play the last policy."""
    script = (
        "import sys, json\n"
        "from ml_pipeline.assembly.run import load_agent, train\n"
        "from ml_pipeline.analysis.evaluate import evaluate\n"
        "run = train(sys.argv[1:]).run_dir\n"
        "t = load_agent(run, 'latest')\n"
        "e = evaluate(t.agent, t.env, n_episodes=20, seed=10**6, deterministic=True)\n"
        "seconds = json.loads((run / 'summary.json').read_text())['train_seconds']\n"
        "print('RESULT', json.dumps([e.mean, t.env_steps, seconds]))\n"
    )
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", script, *words, f"seed={seed}"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command[3:])} failed:\n{done.stderr[-2000:]}")
    mean, env_steps, seconds = json.loads(lines[-1].removeprefix("RESULT "))
    return {"greedy": mean, "env_steps": env_steps, "train_seconds": seconds}


def known_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def key_of(result: dict[str, Any]) -> tuple[str, int]:
    return result["settings"], result["seed"]


def run_all(names: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Off is shared by all ideas that have the same."""
    results, lock = known_results(), Lock()
    done = {key_of(each) for each in results}
    todo: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for task in IDEAS[name].tasks:
            for seed in seeds:
                for is_on in (False, True):
                    words = settings(IDEAS[name], task, is_on=is_on)
                    if (" ".join(words), seed) not in done:
                        todo[" ".join(words), seed] = words

    def work(item: tuple[tuple[str, int], list[str]]) -> None:
        (text, seed), words = item
        try:
            result = {"settings": text, "seed": seed, **train(words, seed)}
        except RuntimeError as error:
            print(error, flush=True)
            return
        result |= {"date": str(date.today()), "machine": f"{platform.machine()}, {jobs} at once"}
        with lock:
            results.append(result)
            results.sort(key=key_of)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{result['greedy']:.1f} in {result['train_seconds']:.0f} s: {text}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, todo.items()))


def page(name: str) -> str:
    """The page of an idea, from the known results."""
    from ml_pipeline.analysis.statistics import (
        are_claimed,
        iqm_with_interval,
        probability_of_improvement,
        rank_sum_p,
    )

    idea, rows, p_values, machines = IDEAS[name], [], [], set()
    for task in idea.tasks:
        groups = []
        for is_on in (False, True):
            text = " ".join(settings(idea, task, is_on=is_on))
            groups.append([each for each in known_results() if each["settings"] == text])
            machines |= {f"{each['date']}, {each['machine']}" for each in groups[-1]}
        if min(map(len, groups)) < _FEWEST_SEEDS:
            continue
        off, on = (np.array([each["greedy"] for each in group]) for group in groups)
        cells = [
            f"{e.value:.0f} ({e.low:.0f} to {e.high:.0f})"
            for e in map(iqm_with_interval, (off, on))
        ]
        better = probability_of_improvement(on, off)
        p_values.append(rank_sum_p([(on, off)]))
        times = [float(np.median([each["train_seconds"] for each in group])) for group in groups]
        chance = f"{better.value:.2f} ({better.low:.2f} to {better.high:.2f})"
        steps, seeds = f"{groups[0][0]['env_steps']:,}", f"{len(off)} and {len(on)}"
        speed = f"{times[0] / times[1]:.2f}"
        rows.append([f"{task}, {steps} steps", seeds, *cells, chance, speed])
    claims = are_claimed(p_values)
    for row, is_claimed in zip(rows, claims, strict=True):
        row.append("yes" if is_claimed else "no")
    head = ["task", "seeds", "off", "on", "P(on ends above off)", "speed", "difference at 95 %"]
    table = [head, ["---"] * len(head), *rows]
    words = " ".join(idea.on[""] if "" in idea.on else idea.on[idea.tasks[0]])
    lines = [
        f"# {idea.title}",
        "",
        f"{idea.paper}. {idea.what}",
        "",
        "```",
        f"python train_ppo.py {words}",
        "```",
        "",
        "IQM over the seeds of 20 greedy episodes of the last policy, with 95 % intervals. `speed`",
        "divides the training time of off by that of on. The last column is Wilcoxon's rank-sum",
        "test, corrected for all tasks.",
        "",
        *(f"| {' | '.join(row)} |" for row in table),
        "",
        summary(rows),
        "",
        f"`python benchmarks/ideas.py {name}`; {'; '.join(sorted(machines))};",
        "raw file [ideas.json](../../benchmarks/results/ideas.json).",
        "",
    ]
    return "\n".join(lines)


def summary(rows: Sequence[Sequence[str]]) -> str:
    """What the table says, and no more."""
    claimed = [row for row in rows if row[-1] == "yes"]
    if not claimed:
        return "No difference holds at 95 %: leave it off unless your own task shows one."
    parts = []
    for row in claimed:
        direction = "better" if float(row[4].split()[0]) > 0.5 else "worse"
        parts.append(f"{direction} on {row[0].partition(',')[0]}")
    rest = "; no difference holds on the other tasks" if len(claimed) < len(rows) else ""
    return f"With these settings and budgets it is {', '.join(parts)}{rest}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[[], *IDEAS], metavar="NAME", help=f"{', '.join(IDEAS)}"
    )
    parser.add_argument("--all", action="store_true", help="every idea")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings")
    parser.add_argument("--pages", action="store_true", help="write the pages only")
    args = parser.parse_args()
    names = list(IDEAS) if args.all else args.names
    if not args.pages:
        run_all(names, args.seeds, args.jobs)
    PAGES.mkdir(exist_ok=True)
    for name in names:
        (PAGES / f"{name}.md").write_text(page(name))
        print(page(name))


if __name__ == "__main__":
    main()
