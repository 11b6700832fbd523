"""Local times to UTC: clock changes included."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.extras import import_extra
from ml_pipeline.worlds.trading.data.market import DataError

_MINUTE = 60_000_000_000

Times = NDArray[np.int64]


def to_utc(local: Times, zone: str) -> tuple[Times, NDArray[np.bool_]]:
    """UTC nanoseconds of local ones, and which of them the clock of the zone skips.

    ``zone`` is an IANA name, UTC, or either with a shift: UTC-05:00, America/New_York+07:00. A
    time that the clock shows twice is the earlier one, unless the times step back before it.
    """
    name, shift = _parsed(zone)
    local = local - shift
    if name == "UTC":
        return local, np.zeros(len(local), dtype=np.bool_)
    early, late = _assumed(local, name, "earliest"), _assumed(local, name, "latest")
    is_skipped = late - early == 1  # the last nanosecond before the change, and the change
    utc = early.copy()
    is_late = False
    for row in np.flatnonzero((early != late) & ~is_skipped):
        goes_on = row > 0 and early[row - 1] != late[row - 1]
        is_late = bool(goes_on and (is_late or local[row] <= local[row - 1]))
        utc[row] = late[row] if is_late else early[row]
    return utc, is_skipped


def _parsed(zone: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)(?:([+-])(\d\d):(\d\d))?", zone)
    if match is None or not match[1]:
        raise DataError(
            f"timezone={zone}: is not a zone; write UTC, Europe/Athens, UTC+02:00 or "
            "America/New_York+07:00"
        )
    minutes = int(match[3] or 0) * 60 + int(match[4] or 0)
    return match[1], (-minutes if match[2] == "-" else minutes) * _MINUTE


def _assumed(local: Times, name: str, choice: str) -> Times:
    arrow: Any = import_extra("pyarrow", needed_by="market data")
    compute: Any = import_extra("pyarrow.compute", needed_by="market data")
    naive = arrow.array(local, arrow.timestamp("ns"))
    try:
        aware = compute.assume_timezone(naive, name, ambiguous=choice, nonexistent=choice)
    except arrow.ArrowInvalid as error:
        raise DataError(f"timezone={name}: {error}; write a name such as Europe/Athens") from error
    return np.asarray(aware.cast(arrow.int64()).to_numpy())
