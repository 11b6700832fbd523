"""The numbers of a run depend only on seed and config; changes to the code keep them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import read_rows
from reference_runs import FOLDER, RUNS, machine, train

RECORDED_ON = json.loads((FOLDER / "machine.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "cartpole_serial" else pytest.mark.slow)
        for name in RUNS
    ],
)
def test_reference_run_repeats_its_recorded_metrics(name: str, tmp_path: Path) -> None:
    recorded = read_rows(FOLDER / f"{name}.csv")

    rows = train(name, tmp_path)

    assert len(rows) == len(recorded)
    if machine() == RECORDED_ON:
        assert rows == recorded
    else:
        # Another CPU or torch rounds differently: only the first iteration stays close.
        assert rows[0].keys() == recorded[0].keys()
        for column, value in recorded[0].items():
            ours, theirs = float(rows[0][column] or 0), float(value or 0)
            assert math.isclose(ours, theirs, rel_tol=0.02, abs_tol=0.02), column
