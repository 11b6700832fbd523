"""Periods: train, validation and test, in this order of time, with an embargo between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.bars import text_of
from ml_pipeline.worlds.trading.data.market import DataError

PERIODS = ("train", "validation", "test", "all")
_SHORTEST = 2  # rows: an order fills in the next one


def periods(
    time: NDArray[np.int64], *, validation: float | str, test: float | str, embargo: int
) -> dict[str, slice]:
    """The rows of each period.

    A share counts rows, the test period being the last ones. A date is the first day of a period
    in UTC: a bar that ends at its midnight belongs to the day before. ``embargo`` rows are dropped
    at the end of train and of validation.
    """
    n_rows = len(time)
    test_start = _start(time, test, n_rows, "test")
    validation_start = _start(time, validation, test_start, "validation")
    if validation_start > test_start:
        raise DataError(f"validation={validation}: must be before test={test}")
    has_validation, has_test = validation_start < test_start, test_start < n_rows
    train_end = validation_start - (embargo if has_validation or has_test else 0)
    found = {"train": slice(0, max(train_end, 0)), "all": slice(0, n_rows)}
    found["validation"] = slice(validation_start, test_start - (embargo if has_test else 0))
    found["test"] = slice(test_start, n_rows)
    if not has_validation:
        found["validation"] = slice(validation_start, validation_start)
    for name in ("train", *["validation"] * has_validation, *["test"] * has_test):
        if found[name].stop - found[name].start < _SHORTEST:
            raise DataError(
                f"too short: {n_rows} rows from {text_of(int(time[0]))} to "
                f"{text_of(int(time[-1]))} leave no {name} period with validation={validation}, "
                f"test={test} and an embargo of {embargo} rows"
            )
    return found


def _start(time: NDArray[np.int64], value: float | str, end: int, name: str) -> int:
    """The first row of a period that is a share of all rows before ``end``, or starts at a date."""
    if not isinstance(value, str):
        return end - int(value * len(time))
    try:
        date = np.datetime64(value.replace(" ", "T"), "ns").astype(np.int64)
    except ValueError as error:
        raise DataError(f"{name}={value}: not a date such as 2024-01-31") from error
    return int(np.searchsorted(time, date, side="right"))
