"""Evidence for an idea: off and on, over seeds and tasks, written to docs/ideas/NAME.md.

    python benchmarks/ideas.py rpo muon --jobs 2     # trains what is not known yet
    python benchmarks/ideas.py --all --pages         # only writes the pages, from ideas.json

Each training is one ``ml_pipeline train``; then its last policy plays 20 greedy episodes that
training never saw. Results are in benchmarks/results/ideas.json, an entry per task, setting and
seed. Off and on have the same seeds and run in turn, so the times of a page compare one machine.
Further settings, to put beside them, run last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
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

_CORRIDOR = [  # experiment=corridor, whose keys of the network an MLP does not have
    *("env=corridor", "total_steps=6_144", "n_envs=8", "agent.n_steps=64", "agent.n_epochs=4"),
    *("agent.n_minibatches=4", "agent.entropy_coef=0.01"),
]
_SYMBOLS = [  # of MiniGrid as a vector, for an MLP
    *("n_envs=16", "agent.n_epochs=4", "agent.entropy_coef=0.01", "agent.normalize_obs=true"),
    "+env.wrappers.image._target_=minigrid.wrappers.ImgObsWrapper",
    "+env.wrappers.flat._target_=gymnasium.wrappers.FlattenObservation",
]
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
    "MiniGrid-DoorKey-6x6-v0": [
        *("env.id=MiniGrid-DoorKey-6x6-v0", "total_steps=500_000", *_SYMBOLS),
    ],
    "MiniGrid-KeyCorridorS3R1-v0": [
        *("env.id=MiniGrid-KeyCorridorS3R1-v0", "total_steps=1_000_000", *_SYMBOLS),
    ],
    "Lanes (4)": ["experiment=lanes", "total_steps=12_288"],
    "Lanes (8)": ["experiment=lanes", "+env.kwargs.n_lanes=8", "total_steps=12_288"],
    "Corridor of 8 steps": [*_CORRIDOR, "+env.kwargs.length=8"],
    "Corridor of 16 steps": [*_CORRIDOR],
    "CartPole-v1 without velocities": ["experiment=cartpole_memory", "total_steps=50_000"],
    "Breakout": ["experiment=breakout", "total_steps=1_000_000"],
    "Pong": ["experiment=pong", "total_steps=1_000_000"],
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
    # Further settings, by their label; they have no interval and no test
    beside: Mapping[str, Mapping[str, list[str]]] = MappingProxyType({})
    limits: str = ""  # of what the page can claim


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
        {
            "LSTM": {
                "CartPole-v1": blind(
                    "CartPole-v1",
                    *("+agent.obs_groups.actor=[obs]", "+agent.obs_groups.critic=[obs]"),
                    *("network=lstm", "agent.n_minibatches=4"),
                )
            }
        },
        "The critic cannot replace memory: an MLP that sees only the positions of CartPole does "
        "not know which way the pole falls. An LSTM that sees as little, with as blind a critic, "
        "has 500 with each of five seeds after 99,328 steps "
        "(`experiment=cartpole_memory`, [learning.json](../../benchmarks/results/learning.json)).",
    ),
    "rnd": Idea(
        "Random network distillation",
        "Burda et al., 2018, arXiv:1810.12894",
        "A bonus for observations that a network cannot predict yet, because they are new.",
        (
            *("MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"),
            *("MiniGrid-DoorKey-6x6-v0", "MiniGrid-KeyCorridorS3R1-v0"),
        ),
        {"": [f"agent.on_rollout._target_={_IDEAS}.rnd.RND"]},
        limits="MountainCar is hard to explore: -200 means that a policy never reaches the flag in "
        "200 steps, and no seed learns to, with bonuses or without. In MiniGrid a reward comes "
        "only at the end of an episode, and PPO finds it without bonuses too: in DoorKey with each "
        "seed, in KeyCorridor with four of five (the fifth has 0), against five of five with "
        "bonuses. One seed of five is no evidence, and larger mazes are open.",
    ),
    "hybrid_actions": Idea(
        "Actions of discrete and continuous parts",
        "Fan et al., 2019, arXiv:1903.01344",
        "Each part of a Dict action, here a lane and a speed, has its own distribution. `off` is "
        "one of 8 levels in the place of the speed, and `numbers` a number for each lane, of which "
        "the largest decides: what algorithms need that have only one kind of action.",
        ("Lanes (4)", "Lanes (8)"),
        {"": []},
        {"": ["+env.wrappers.flat._target_=flat_lanes.Levels"]},
        {"numbers": {"": ["+env.wrappers.flat._target_=flat_lanes.Numbers"]}},
        "The best return is 32, and 31 with 8 levels. The right lane at the best fixed speed gets "
        "26, the right speed in any open lane 27; above that a seed has solved the task. Lanes is "
        "one small env whose steps do not depend on each other, so the page says nothing on "
        "exploration, on long episodes or on many parts.",
    ),
    "memory": Idea(
        "Attention as memory",
        "Parisotto et al., 2020, arXiv:1910.06764",
        "The policy attends to the last steps of its episode (`network=trxl`). `off` is an LSTM of "
        "the same size; a GRU and an MLP without memory are beside them.",
        ("Corridor of 8 steps", "Corridor of 16 steps", "CartPole-v1 without velocities"),
        {"": ["network=trxl", "network.size=32"]},
        {"": ["network=lstm", "network.size=32"]},
        {
            "GRU": {"": ["network=lstm", "network.cell=gru", "network.size=32"]},
            "MLP": {"": ["network=mlp"]},
        },
        "0.35 and 0.65 are policies that always answer alike, in these 20 episodes. "
        "A corridor is shorter than the window of 32 steps, and the budgets are small. A row shows "
        "what is learned in its steps and no more: with 80,000, an LSTM solves the corridor of 16 "
        "steps on 2 of 5 seeds ([ppo.md](../ppo.md#attention-as-memory)).",
    ),
    "impala": Idea(
        "The IMPALA network with average pooling",
        "Espeholt et al., 2018, arXiv:1802.01561; Sokar and Castro, 2025, arXiv:2505.13772",
        "Residual convolutions instead of those of the Nature DQN, and the mean over the image "
        "before the dense layer.",
        ("Breakout", "Pong"),
        {"": ["network=impala"]},
        {},
        {"no pooling": {"": ["network=impala", "network.pooled=null"]}},
    ),
}


def settings_of(idea: Idea, task: str) -> dict[str, list[str]]:
    """The command line of each setting by its label: off, on, and those beside them."""
    beside = {label: words for label, words in idea.beside.items() if {task, ""} & words.keys()}
    return {
        label: [*TASKS[task], *_COMMON, *words.get(task, words.get("", []))]
        for label, words in {"off": idea.off, "on": idea.on, **beside}.items()
    }


def train(words: Sequence[str], seed: int) -> dict[str, Any]:
    """Train in a folder of its own and play the last policy."""
    from ml_pipeline.analysis.evaluate import evaluate
    from ml_pipeline.assembly.run import load_agent
    from ml_pipeline.assembly.run import train as train_run

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        os.chdir(folder)
        try:
            start = time.process_time()
            run = train_run([*words, f"seed={seed}"]).run_dir
            cpu_seconds = time.process_time() - start
            trained = load_agent(run, "latest")
            played = evaluate(
                trained.agent, trained.env, n_episodes=20, seed=10**6, deterministic=True
            )
            seconds = json.loads((run / "summary.json").read_text())["train_seconds"]
        finally:
            os.chdir(before)
    return {
        "greedy": played.mean,
        "env_steps": trained.env_steps,
        "train_seconds": seconds,
        "cpu_seconds": cpu_seconds,  # of this process, whatever else ran beside it
    }


def train_all(
    todo: Mapping[tuple[str, int], Sequence[str]], jobs: int
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Train each entry in one of ``jobs`` processes, and give its result once it is known.

    A key is the settings and the seed. An entry that fails is printed and left out.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(REPOSITORY))  # spawned processes take over both
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train, words, key[1]): key for key, words in todo.items()}
        for future in as_completed(futures):
            text, seed = futures[future]
            if error := future.exception():
                print(f"{text} seed={seed} failed: {error!r}", flush=True)
                continue
            yield (text, seed), future.result()


def known_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def key_of(result: dict[str, Any]) -> tuple[str, int]:
    return result["settings"], result["seed"]


def run_all(
    names: Sequence[str], seeds: Sequence[int], jobs: int, tasks: Sequence[str] = tuple(TASKS)
) -> None:
    """Settings that several ideas have in common run once."""
    results = known_results()
    done = {key_of(each) for each in results}
    pairs, beside = [], []
    for name in names:
        for task in [each for each in IDEAS[name].tasks if each in tasks]:
            compared = settings_of(IDEAS[name], task)
            pairs.append([compared.pop("off"), compared.pop("on")])
            beside.append([*compared.values()])
    todo = {
        (" ".join(words), seed): words
        for group in (*pairs, *beside)
        for seed in seeds
        for words in group
        if (" ".join(words), seed) not in done
    }
    for (text, seed), result in train_all(todo, jobs):
        results.append({"settings": text, "seed": seed, **result, **origin(jobs)})
        results.sort(key=key_of)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{result['greedy']:.1f} in {result['train_seconds']:.0f} s: {text}", flush=True)


def origin(jobs: int) -> dict[str, str]:
    return {"date": str(date.today()), "machine": f"{platform.machine()}, {jobs} at once"}


def page(name: str) -> str | None:
    """The page of an idea, from the known results; None if these are too few."""
    from ml_pipeline.analysis.statistics import (
        are_claimed,
        iqm_with_interval,
        probability_of_improvement,
        rank_sum_p,
    )

    idea, rows, p_values, machines, left_out = IDEAS[name], [], [], set(), []
    for task in idea.tasks:
        found = results_of(idea, task)
        groups = [found["off"], found["on"]]
        if min(map(len, groups)) < _FEWEST_SEEDS:
            left_out.append(task)
            continue
        for group in found.values():
            machines |= {f"{each['date']}, {each['machine']}" for each in group}
        off, on = (np.array([each["greedy"] for each in group]) for group in groups)
        cells = [
            "{} ({} to {})".format(*(shown(float(each)) for each in (e.value, e.low, e.high)))
            for e in map(iqm_with_interval, (off, on))
        ]
        better = probability_of_improvement(on, off)
        p_values.append(rank_sum_p([(on, off)]))
        chance = f"{better.value:.2f} ({better.low:.2f} to {better.high:.2f})"
        steps, seeds = f"{groups[0][0]['env_steps']:,}", f"{len(off)} and {len(on)}"
        times = median_seconds(groups)
        speed = f"{times[0] / times[1]:.2f}" if times else "-"
        rows.append([f"{task}, {steps} steps", seeds, *cells, chance, speed])
    if not rows:
        return None
    claims = are_claimed(p_values)
    for row, is_claimed in zip(rows, claims, strict=True):
        row.append("yes" if is_claimed else "no")
    head = ["task", "seeds", "off", "on", "P(on ends above off)", "speed", "difference at 95 %"]
    table = [head, ["---"] * len(head), *rows]
    first = idea.tasks[0]
    words = " ".join(idea.on.get(first, idea.on.get("", [])) or TASKS[first])
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
        *([f"Too few seeds for a row yet: {', '.join(left_out)}.", ""] if left_out else []),
        *each_seed(idea),
        *([idea.limits, ""] if idea.limits else []),
        f"`python benchmarks/ideas.py {name}`; {'; '.join(sorted(machines))};",
        "raw file [ideas.json](../../benchmarks/results/ideas.json).",
        "",
    ]
    return "\n".join(lines)


def shown(value: float) -> str:
    """Three digits, but whole numbers from 100 on."""
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:#.3g}"


def results_of(idea: Idea, task: str) -> dict[str, list[dict[str, Any]]]:
    """The known results of each setting, by its label."""
    texts = {label: " ".join(words) for label, words in settings_of(idea, task).items()}
    known = known_results()
    return {
        label: [each for each in known if each["settings"] == text] for label, text in texts.items()
    }


def median_seconds(groups: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Of the trainings of each group: CPU time, or wall time if all results are older.

    Empty if only some are older: they may come from another machine.
    """
    clocks = {"cpu_seconds" in each for group in groups for each in group}
    if len(clocks) > 1:
        return []
    clock = "cpu_seconds" if clocks == {True} else "train_seconds"
    return [float(np.median([each[clock] for each in group])) for group in groups]


def each_seed(idea: Idea) -> list[str]:
    """A table with every seed, if there are settings beside off and on."""
    if not idea.beside:
        return []
    head = ["task", "setting", "return of each seed", "median seconds"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for task in idea.tasks:
        for label, group in results_of(idea, task).items():
            if group:
                returns = ", ".join(shown(each["greedy"]) for each in group)
                seconds = ", ".join(f"{each:.0f}" for each in median_seconds([group])) or "-"
                lines.append(f"| {task} | {label} | {returns} | {seconds} |")
    return [*lines, ""]


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
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        default=list(TASKS),
        metavar="TASK",
        help="train on these of an idea's tasks only",
    )
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings")
    parser.add_argument("--pages", action="store_true", help="write the pages only")
    args = parser.parse_args()
    names = list(IDEAS) if args.all else args.names
    if not args.pages:
        run_all(names, args.seeds, args.jobs, args.tasks)
    PAGES.mkdir(exist_ok=True)
    for name in names:
        text = page(name)
        if text is None:
            print(f"{name}: fewer than {_FEWEST_SEEDS} seeds of each task, so no page")
            continue
        (PAGES / f"{name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
