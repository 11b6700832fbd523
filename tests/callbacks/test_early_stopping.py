"""EarlyStopping: threshold, patience, and its state across a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import Capture, read_rows, small, summary_of

from ml_pipeline.assembly.run import train
from ml_pipeline.callbacks.early_stopping import EarlyStopping
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.checkpoint import load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder


class Stopped:
    """The part of a loop that the callback uses."""

    reason: str | None = None

    def request_stop(self, reason: str) -> None:
        self.reason = reason


def n_values_before_the_stop(callback: EarlyStopping, values: list[float]) -> int | None:
    """How many iterations with these values it takes; None: it does not stop."""
    loop: Any = Stopped()
    for index, value in enumerate(values):
        callback.on_iteration_end(loop, {callback.metric: value})
        callback.on_iteration_end(loop, {"other": 1.0})  # does not count
        if loop.reason is not None:
            return index + 1
    return None


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"threshold": 5.0, "patience": None}, [4.9, math.nan, 5.0, 1.0], 3),
        ({"threshold": 5.0, "patience": None, "mode": "min"}, [6.0, 5.1, 4.0], 3),
        ({"patience": 2}, [1.0, 3.0, 3.0, 2.0, 9.0], 4),  # an equal value is not better
        ({"patience": 2}, [1.0, 0.0, 2.0, 1.0, 3.0], None),
        ({"patience": 2, "mode": "min"}, [3.0, 1.0, 2.0, 2.0], 4),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2, "threshold": 3.0}, [1.0, 0.0, 3.0], 3),
    ],
)
def test_it_stops_at_the_threshold_or_when_patience_ends(
    options: dict[str, Any], values: list[float], expected: int | None
) -> None:
    assert n_values_before_the_stop(EarlyStopping(**options), values) == expected


def test_state_survives_a_resume_unless_another_metric_is_chosen() -> None:
    stopped = EarlyStopping(patience=3)
    assert n_values_before_the_stop(stopped, [9.0, 1.0]) is None
    same, other = EarlyStopping(patience=3), EarlyStopping(patience=3, metric="loss/value")
    for resumed in (same, other):
        resumed.load_state_dict(stopped.state_dict())

    assert n_values_before_the_stop(same, [8.0, 8.0]) == 2
    assert n_values_before_the_stop(other, [8.0, 7.0, 7.0]) is None


def test_run_stops_early_saves_and_counts_on_after_a_resume(here: Path) -> None:
    settings = small(total_steps=32 * 20, callbacks="early_stopping")
    settings += ["callbacks.evaluation.eval_every_steps=32", "agent.learning_rate=1e-9"]
    settings += ["callbacks.early_stopping.patience=3"]

    run = train([*settings, "vec_env=serial"]).run_dir

    assert len(read_rows(run)) == 4  # the policy does not change, so the first value is the best
    state = load_checkpoint(RunFolder.open(run), "latest")
    assert state["env_steps"] == 128
    assert state["callbacks"]["early_stopping"]["n_waited"] == 3
    train([f"resume={run}", "+callbacks.early_stopping.patience=5"])
    assert len(read_rows(run)) == 6
    assert summary_of(run)["status"] == "finished"


def test_metric_that_no_iteration_logs_is_reported(here: Path, capsys: Capture) -> None:
    entry = "{_target_: ml_pipeline.callbacks.early_stopping.EarlyStopping, metric: eval/wim}"

    train([*small(), f"+callbacks.early_stopping={entry}"])

    assert "early stopping: no iteration logged eval/wim\n" in capsys.readouterr().out


def test_default_metric_is_the_best_metric_and_one_rule_is_required() -> None:
    assert EarlyStopping().metric == EVAL_RETURN
    assert EarlyStopping(best_metric="eval/win").metric == "eval/win"
    assert EarlyStopping(metric="loss/value", best_metric="eval/win").metric == "loss/value"
    with pytest.raises(ValueError, match="patience=null: must be a number if threshold is null"):
        EarlyStopping(patience=None)
