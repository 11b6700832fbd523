"""A callback, loss, network or logger that raises during a run: what is saved and what is said."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS, Door, only_run, read_rows, small, summary_of
from own_parts import FileLogger, Wide
from stopped_runs import checkpoint_numbers
from torch import Tensor

from ml_pipeline import train
from ml_pipeline.algorithms.ppo.loss import ppo_loss
from ml_pipeline.analysis.listing import newest_run
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.checks import PartError
from ml_pipeline.training.contracts import Callback, RunningLoop

CALLS = {"n": 0}
MORE = {"total_steps": 128, "callbacks.checkpoints.every_steps": 10_000}


def fail() -> None:
    raise KeyError("boom")


class FailsAt(Callback):
    """Raises in one hook of the second iteration."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_start(self, loop: RunningLoop) -> None:
        if self.hook == "on_train_start":
            fail()

    def on_iteration_end(self, loop: RunningLoop, metrics: Any) -> None:
        if self.hook == "on_iteration_end" and loop.iteration == 2:
            fail()

    def on_iteration_logged(self, loop: RunningLoop, metrics: Any) -> None:
        if self.hook == "on_iteration_logged" and loop.iteration == 2:
            fail()

    def on_train_end(self, loop: RunningLoop) -> None:
        if self.hook == "on_train_end":
            fail()


def _fail_later(n_calls: int) -> None:
    CALLS["n"] += 1
    if CALLS["n"] > n_calls:
        fail()


def failing_loss(*arguments: Any) -> Any:
    _fail_later(CALLS["allowed"])
    return ppo_loss(*arguments)


class FailingNetwork(Wide):
    def forward(self, obs: Tensor) -> Tensor:
        _fail_later(CALLS["allowed"])
        return super().forward(obs)


class FailingLogger(FileLogger):
    def log(self, metrics: Any, *, env_steps: int) -> None:
        if env_steps == 64:
            fail()


@pytest.mark.parametrize(
    ("hook", "saved"),
    [
        ("on_train_start", None),
        ("on_iteration_end", 64),
        ("on_iteration_logged", 64),
        ("on_train_end", 128),
    ],
)
def test_run_whose_callback_raises_is_saved_and_names_it(
    hook: str, saved: int | None, here: Path
) -> None:
    with pytest.raises(PartError) as raised:
        train(small(**MORE), callbacks=[FailsAt(hook)], quiet=True)

    run = only_run(here)
    line = inspect.getsourcelines(fail)[1] + 1
    path = run.relative_to(here) / "traceback.txt"
    assert str(raised.value) == (
        f"callbacks.FailsAt: KeyError: 'boom' (test_failing_parts.py:{line} in fail); "
        f"the whole traceback: {path}"
    )
    assert isinstance(raised.value.__cause__, KeyError)
    assert f"in {hook}\n    fail()" in path.read_text()
    assert summary_of(run)["status"] == "failed"
    if saved is None:
        return
    assert load_checkpoint(RunFolder(run), LATEST)["env_steps"] == saved
    assert read_rows(run)[-1]["env_steps"] == str(saved)
    if saved < 128:
        train(resume=run, quiet=True)
        assert read_rows(run)[-1]["env_steps"] == "128"


@pytest.mark.parametrize(
    "words",
    [
        ["agent.loss._target_=test_failing_parts.failing_loss"],
        ["network=own", "network._target_=test_failing_parts.FailingNetwork"],
    ],
)
def test_error_in_the_middle_of_an_update_leaves_the_last_whole_iteration(
    words: list[str], here: Path
) -> None:
    settings = [*small(**MORE), *words, "~callbacks.evaluation"]
    CALLS.update(n=0, allowed=10**9)
    whole = train(settings, callbacks=lambda loop, _: False, quiet=True).run_dir
    CALLS.update(n=0)
    train(settings, callbacks=lambda loop, _: loop.iteration < 2, quiet=True)
    CALLS.update(n=0, allowed=CALLS["n"] - 1)  # the last minibatch of the second iteration

    with pytest.raises(PartError, match=r"^iteration 2: KeyError: 'boom' \(test_failing_parts.py"):
        train(settings, quiet=True)

    run = newest_run(here / "runs")
    saved, first = (checkpoint_numbers(each) for each in (run.path, whole))
    assert saved["['env_steps']"] == first["['env_steps']"] == 32
    weights = [name for name in first if name.startswith("['agent']")]
    assert [name for name in weights if saved[name] != first[name]] == []
    CALLS.update(n=0, allowed=10**9)
    train(resume=run.path, quiet=True)
    assert read_rows(run.path)[-1]["env_steps"] == "128"


def test_logger_that_raises_is_named_and_the_iteration_is_saved(here: Path) -> None:
    words = ["+logger.mine._target_=test_failing_parts.FailingLogger"]

    with pytest.raises(PartError, match=r"^logger FailingLogger: KeyError: 'boom' \(test_failing"):
        train(small(**MORE), words, quiet=True)

    assert load_checkpoint(RunFolder.open(only_run(here)), LATEST)["env_steps"] == 64


def test_on_the_command_line_the_error_is_one_line(here: Path, door: Door) -> None:
    mine = ["+callbacks.mine._target_=own_parts.EndAt", "+callbacks.mine.iteration=2"]

    failed = door(*small(total_steps=128), *mine, ENDING="error", PYTHONPATH=str(TESTS))

    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("callbacks.mine: RuntimeError: error at iteration 2 (own_parts.py:")
    assert "resume with:" in failed.stdout


def test_error_without_text_names_its_place_once(here: Path) -> None:
    def bare(loop: RunningLoop, metrics: Any) -> None:
        raise AssertionError

    with pytest.raises(PartError) as raised:
        train(small(), callbacks={"mine": bare}, quiet=True)
    assert str(raised.value).count("test_failing_parts.py:") == 1
