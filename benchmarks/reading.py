"""How much of the package one training iteration runs through: files and different lines.

    python benchmarks/reading.py

Traces one call of ``train_episode_vectorized`` in default runs of PPO, DQN and SAC with
``sys.settrace``: from the env step to the gradient.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ml_pipeline.assembly.run import train
from ml_pipeline.records import Metrics
from ml_pipeline.training.contracts import Callback, RunningLoop

PACKAGE = Path(__file__).resolve().parents[1] / "ml_pipeline"
COMMON = ["vec_env=serial", "logger=none", "device=cpu", "~callbacks.evaluation"]
RUNS = {
    "PPO": ["env=cartpole", "num_episodes=3"],
    "PPO, agent.fast=off": ["env=cartpole", "num_episodes=3", "agent.fast=off"],
    "DQN": ["agent=dqn", "env=cartpole", "num_episodes=6", "agent.learning_starts=256"],
    "SAC": ["agent=sac", "env=pendulum", "num_episodes=6", "agent.learning_starts=256"],
}


class Trace(Callback):
    """Records the lines of one iteration."""

    def __init__(self, iteration: int) -> None:
        self.lines: dict[str, set[int]] = collections.defaultdict(set)
        self._iteration = iteration

    def on_train_start(self, loop: RunningLoop) -> None:
        self._watch(loop, 1)

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        sys.settrace(None)
        self._watch(loop, loop.iteration + 1)

    def _watch(self, loop: RunningLoop, following: int) -> None:
        if following != self._iteration:
            return
        original = loop.trainer.train_episode_vectorized

        def traced(*arguments: Any) -> Metrics:
            sys.settrace(self._on_call)
            try:
                return original(*arguments)
            finally:
                sys.settrace(None)

        vars(loop.trainer)["train_episode_vectorized"] = traced

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return None
        lines = self.lines[file]
        lines.add(frame.f_lineno)

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return on_line

        return on_line


def main() -> None:
    found = {}
    for name, overrides in RUNS.items():
        trace = Trace(iteration=2 if name.startswith("PPO") else 5)
        train([*overrides, *COMMON], callbacks={"trace": trace})
        found[name] = trace.lines
    for name, lines in found.items():
        print(f"\n{name}: {len(lines)} files, {sum(map(len, lines.values()))} lines")
        for file, numbers in sorted(lines.items(), key=lambda pair: -len(pair[1])):
            print(f"  {len(numbers):4}  {Path(file).relative_to(PACKAGE)}")


if __name__ == "__main__":
    main()
