"""Work of one training iteration in Python: bytecode instructions and calls of compiled functions.

    python benchmarks/operations.py
    git worktree add ../before COMMIT
    python benchmarks/operations.py ../before .

The counts are the same in every run, so they show a change of a percent on a machine where times
differ by a third. They say nothing about the work inside NumPy, torch or a compiled env; that is
benchmarks/turns.py. Envs run in this process, and their own instructions are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

COMMON = ["vec_env=serial", "device=cpu", "logger=none", "~callbacks.evaluation"]
# The settings, and the iteration whose work is counted; in the next one calls are counted.
RUNS = {
    "PPO, 8 CartPoles": (["env=cartpole", "n_envs=8", "agent.n_steps=32", "num_episodes=8"], 5),
    "PPO, 1 CartPole": (["env=cartpole", "n_envs=1", "agent.n_steps=256", "num_episodes=8"], 5),
    "PPO, plain torch": (["env=cartpole", "n_envs=8", "agent.fast=off", "num_episodes=8"], 5),
    "DQN, 1 CartPole": (["agent=dqn", "env=cartpole", "n_envs=1", "num_episodes=12"], 9),
    "SAC, 1 Pendulum": (["agent=sac", "env=pendulum", "n_envs=1", "num_episodes=12"], 9),
}


def count(name: str) -> dict[str, int]:
    """Instructions, Python calls and compiled calls of one iteration, in this checkout."""
    from ml_pipeline.assembly.run import train
    from ml_pipeline.training.contracts import Callback

    settings, counted = RUNS[name]
    found = {"instructions": 0, "Python calls": 0, "compiled calls": 0}

    def on_instruction(frame: FrameType, event: str, argument: Any) -> Any:
        found["instructions"] += event == "opcode"
        return on_instruction

    def on_frame(frame: FrameType, event: str, argument: Any) -> Any:
        if "/gymnasium/envs/" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return on_instruction

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        found["Python calls"] += event == "call"
        found["compiled calls"] += event == "c_call"

    class Counter(Callback):
        def on_iteration_end(self, loop: Any, metrics: Any) -> None:
            start = {counted - 1: start_instructions, counted: start_calls}.get(loop.iteration)
            vars(loop.trainer).pop("train_episode_vectorized", None)
            if start is not None:
                original = loop.trainer.train_episode_vectorized
                vars(loop.trainer)["train_episode_vectorized"] = watched(original, start)

    def start_instructions() -> None:
        sys.settrace(on_frame)

    def start_calls() -> None:
        sys.setprofile(on_call)

    def watched(original: Callable[..., Any], start: Callable[[], None]) -> Callable[..., Any]:
        def iteration(*arguments: Any) -> Any:
            start()
            try:
                return original(*arguments)
            finally:
                sys.settrace(None)
                sys.setprofile(None)

        return iteration

    learning = ["agent.learning_starts=256"] if settings[0] in ("agent=dqn", "agent=sac") else []
    train([*settings, *learning, *COMMON], callbacks={"counter": Counter()})
    return found


def counted_in(checkout: Path, name: str) -> dict[str, int]:
    """``count`` in a process that imports the package of ``checkout``."""
    paths = [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", name],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(count(sys.argv[2])))
        return
    checkouts = [Path(word) for word in sys.argv[1:]] or [Path(__file__).parents[1]]
    print(f"| run | {' | '.join(f'{each}' for each in checkouts)} | last / first |")
    print(f"|---|{'---|' * (len(checkouts) + 1)}")
    for name in RUNS:
        rows = [counted_in(checkout, name) for checkout in checkouts]
        for kind in rows[0]:
            numbers = [row[kind] for row in rows]
            cells = " | ".join(f"{number:,}" for number in numbers)
            print(f"| {name}, {kind} | {cells} | {numbers[-1] / numbers[0]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
