"""How much of the package a reader has to follow: one iteration, and one setting.

    python benchmarks/reading.py

The first table traces one call of ``train_episode_vectorized`` in default runs of PPO, DQN and SAC
with ``sys.settrace``, from the env step to the gradient: files and different lines.

The second table follows ``agent.learning_rate`` from the YAML file to the first step of Adam.
A file is on the path if it makes the ``AgentConfig``, or if one of its frames passes or receives it
as an argument, or the number itself, alone or in a record. Two kinds of calls do not count: checks
of a config when it is made, and calls whose parameter is a Protocol without ``learning_rate``.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from ml_pipeline.assembly.run import train
from ml_pipeline.config.agent import AgentConfig
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


RATE = 0.00123456  # so rare that an equal number is this one


class SettingTrace:
    """Records the files through which ``agent.learning_rate`` reaches Adam."""

    def __init__(self) -> None:
        self.files: list[str] = []  # in the order in which they are reached
        self._is_over = False

    def on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or self._is_over or not _is_ours(frame):
            return
        callers = list(_callers(frame))
        if code.co_name == "__post_init__" and isinstance(frame.f_locals["self"], AgentConfig):
            self._add(callers[0], frame)
        if any(each.f_code.co_name == "__post_init__" for each in callers):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            if name != "self" and _carries(frame.f_locals[name]) and not _is_narrow(frame, name):
                self._add(callers[0], frame)
                self._is_over = code.co_filename.endswith("optimiser.py")

    def _add(self, *frames: FrameType) -> None:
        for each in frames:
            name = str(Path(each.f_code.co_filename).relative_to(PACKAGE))
            if name not in self.files:
                self.files.append(name)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """The frames of the package that wait for this one, the nearest first."""
    caller = frame.f_back
    while caller is not None:
        if _is_ours(caller):
            yield caller
        caller = caller.f_back


def _carries(value: object) -> bool:
    parts = list(value) if isinstance(value, tuple) else [value]
    is_number = any(type(each) is float and each == RATE for each in parts)
    return is_number or isinstance(value, AgentConfig)


def _is_narrow(frame: FrameType, name: str) -> bool:
    """Whether the parameter is a Protocol that hides the learning rate."""
    functions = [each for each in gc.get_referrers(frame.f_code) if isinstance(each, FunctionType)]
    kind = frame.f_globals.get(str(functions[0].__annotations__.get(name))) if functions else None
    return getattr(kind, "_is_protocol", False) and not hasattr(kind, "learning_rate")


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
    setting = SettingTrace()
    sys.setprofile(setting.on_event)
    train([*RUNS["PPO"], *COMMON, f"agent.learning_rate={RATE}"])
    sys.setprofile(None)
    print(f"\nagent.learning_rate from YAML to Adam: {len(setting.files)} files")
    for file in setting.files:
        print(f"  {file}")


if __name__ == "__main__":
    main()
