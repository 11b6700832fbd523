"""Bad market files are refused in one line with the file, the line and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from market_rows import FILES, random_bars, write_table

from ml_pipeline.worlds.trading.data.files import market_files, read_bars
from ml_pipeline.worlds.trading.data.layouts import PLAIN, FileFormat
from ml_pipeline.worlds.trading.data.market import DataError

HEADER = "time,open,high,low,close,volume"
GOOD = [f"2024-01-01 0{hour}:00:00,10,12,9,11,5" for hour in range(6)]

# What replaces line 4 (the third bar) of a good file, and the error.
BAD_LINES = {
    "unsorted": ("2024-01-01 00:30:00,10,12,9,11,5", "earlier than the bar before"),
    "duplicate": ("2024-01-01 01:00:00,10,12,9,11,5", "repeats the time of the bar before"),
    "nan": ("2024-01-01 02:00:00,10,12,9,NaN,5", "close is missing or not finite"),
    "infinity": ("2024-01-01 02:00:00,10,inf,9,11,5", "high is missing or not finite"),
    "empty cell": ("2024-01-01 02:00:00,10,12,,11,5", "low is missing or not finite"),
    "empty time": (",10,12,9,11,5", "time is missing|time '' is not a time"),
    "high below low": ("2024-01-01 02:00:00,10,8,9,11,5", "high is below low"),
    "zero price": ("2024-01-01 02:00:00,0,12,9,11,5", "open is not positive"),
    "negative price": ("2024-01-01 02:00:00,10,12,-9,11,5", "low is not positive"),
    "negative volume": ("2024-01-01 02:00:00,10,12,9,11,-5", "volume is negative"),
    "text": ("2024-01-01 02:00:00,10,12,9,eleven,5", "close 'eleven' is not a number"),
    "separator": ("2024-01-01 02:00:00;10;12;9;11;5", "1 columns, but line 1 has 6"),
    "missing cell": ("2024-01-01 02:00:00,10,12,9,11", "5 columns, but line 1 has 6"),
    "mixed zones": ("2024-01-01 02:00:00-05:00,10,12,9,11,5", "mixed zones"),
    "mixed clocks": ("1704074400000,10,12,9,11,5", "mixed zones"),
    "date of another country": ("01/02/2024 02:00,10,12,9,11,5", "is not a time"),
}


def refusal(path: Path, form: FileFormat = PLAIN, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_bars(market_files(str(path)), form, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """X.csv with six good bars."""
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, *GOOD]))
    return path


def test_the_good_file_is_accepted(good: Path) -> None:
    bars, _ = read_bars([good])

    assert len(bars["X"].time) == 6


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named(good: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    good.write_text("\n".join([HEADER, *GOOD[:2], line, *GOOD[3:]]))

    text = refusal(good)

    assert text.startswith(f"{good}:4: ")
    assert any(each in text for each in reason.split("|"))


def test_bad_bar_of_one_symbol_among_others_is_named_by_its_line(tmp_path: Path) -> None:
    text = (FILES / "table.csv").read_text().replace("20.5;22.5;20.0;22.0", "20.5;22.5;0;22.0")
    path = tmp_path / "X.csv"
    path.write_text(text)

    assert refusal(path).startswith(f"{path}:6: ")
    assert "low is not positive" in refusal(path)


UNKNOWN = "1: not a known layout: "
LACKS = f"{UNKNOWN}it lacks time, open, high, low, close"

# The content of a file, and what follows its path in the error.
BAD_FILES = {
    "blank lines count": ("\n".join([HEADER, GOOD[0], "", "", GOOD[1], GOOD[1], ""]), "6: "),
    "other names": (
        "when,open,high,low,last,volume\n",
        f"{UNKNOWN}it lacks time, close; found when open high low last volume; "
        "name them: env.kwargs.data.columns={time: NAME, close: NAME}",
    ),
    "a name twice": (
        "time,open,high,low,close,close\n",
        f"{UNKNOWN}it has close twice; found time open high low close close; "
        "name them: env.kwargs.data.columns={close: NAME}",
    ),
    "two times": (
        "timestamp,date,open,high,low,close\n",
        f"{UNKNOWN}it has time twice; found timestamp date open high low close; "
        "name them: env.kwargs.data.columns={time: NAME}",
    ),
    "separator": (
        "time|open|high|low|close|volume\n",
        f"{LACKS}; found time|open|high|low|close|volume; "
        "separate columns by commas, semicolons or tabs",
    ),
    "no header": ("1704067200000,1,2,3\n", f"{UNKNOWN}4 columns"),
    "empty": ("", " too short"),
    "blank": ("\n\n", " too short"),
    "no bars": (HEADER, " too short"),
    "one bar": (f"{HEADER}\n{GOOD[0]}\n", " too short"),
    "zero bytes": (b"\0\0\n\0", LACKS),
    "one long cell": (b"x" * 200_000, LACKS),
    "UTF-16": (b"\xff\xfet\0i\0m\0e\0", LACKS),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_with_its_line_or_header(tmp_path: Path, case: str) -> None:
    content, reason = BAD_FILES[case]
    path = tmp_path / "X.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert refusal(path).startswith(f"{path}:{reason}")


def test_bad_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"open": [1.0, 1.0], "high": [1.0, 1.0], "low": [1.0, 2.0], "close": [1.0, 1.0]}
    pq.write_table(
        pa.table({"time": [1_704_067_200, 1_704_070_800], **columns}), tmp_path / "X.parquet"
    )

    assert refusal(tmp_path / "X.parquet").startswith(f"{tmp_path / 'X.parquet'}: row 2: ")


def test_text_with_the_name_of_a_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "X.parquet"
    path.write_text("time,open")

    assert refusal(path).startswith(f"{path}: not a Parquet file")


def test_two_files_with_the_same_bars_are_refused(tmp_path: Path) -> None:
    for name in ("BTCUSDT-1h-2024-01.csv", "BTCUSDT-1h-2024-02.csv"):
        (tmp_path / name).write_text((FILES / "BTCUSDT-1h-2024-12.csv").read_text())

    assert "each bar must be in one file only" in refusal(tmp_path)


def test_bars_of_different_lengths_need_a_common_one(tmp_path: Path) -> None:
    write_table(tmp_path / "A.csv", random_bars(9))
    write_table(tmp_path / "B.csv", random_bars(9, length=4 * 3_600_000_000_000))

    assert "A of 1h and B of 4h; set bar=4h" in refusal(tmp_path, FileFormat(label="end"))


@pytest.mark.parametrize(
    ("file", "options", "reason"),
    [
        ("X.csv", {"form": FileFormat("Mars/Olympus")}, "timezone=Mars/Olympus"),
        ("X.csv", {"symbols": ["Y"]}, "symbols=Y: not in the files; found X"),
        ("X.csv", {"further": ["signal"]}, "column signal is missing"),
        ("X.csv", {"length": 60_000_000_000}, "bar=1m: must be a multiple of the bars of X, which"),
        (
            "X.csv",
            {"form": FileFormat(columns={"volume": "lots"})},
            "it lacks volume; found time open high low close volume; name them",
        ),
        ("ccxt_plain.csv", {"form": FileFormat("Europe/Berlin")}, "have a zone; remove the key"),
        (
            "BTCUSDT-1h-2024-12.csv",
            {"form": FileFormat(label="end")},
            "BTCUSDT-1h-2024-12.csv looks like a file of binance",
        ),
        ("EURUSD_M1_*.csv", {}, ".csv: MT5 writes the broker's time; set timezone"),
    ],
)
def test_settings_that_do_not_fit_the_file_are_refused(
    good: Path, file: str, options: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(good if file == "X.csv" else FILES / file, **options)


def test_skipped_hour_is_refused(good: Path) -> None:
    good.write_text(f"{HEADER}\n2024-03-31 01:00,1,1,1,1,1\n2024-03-31 02:30,1,1,1,1,1\n")

    text = refusal(good, form=FileFormat("Europe/Berlin"))
    assert f"{good}:3: the clock of Europe/Berlin skips this time" in text


@pytest.mark.parametrize("name", ["missing.csv", "empty"])
def test_path_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    assert refusal(tmp_path / name).startswith(f"path={tmp_path / name}: no such file")


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.name)
def test_damaged_file_is_read_or_refused_but_never_crashes(tmp_path: Path, file: Path) -> None:
    """Cut, repeat, swap and overwrite parts of a good file, 60 times."""
    random = np.random.default_rng(7)
    good = file.read_bytes()
    path = tmp_path / file.name
    refusals = []
    for _ in range(60):
        a, b = sorted(random.integers(0, len(good) + 1, 2))
        junk = bytes(
            random.choice(list(b'\t\n,;"-:.0919Zx\x00\xff'), random.integers(1, 4)).tolist()
        )
        content = [
            good[:a],
            good[:a] + junk + good[a:],
            good[:a] + junk + good[a + len(junk) :],
            good[:a] + good[b:],
            good[:b] + good[a:],
        ][random.integers(5)]
        path.write_bytes(content)
        zone = "Europe/Athens" if file.name.startswith("EURUSD_M1") else None
        try:
            read_bars([path], FileFormat(zone))
        except DataError as error:
            refusals.append(str(error))

    assert len(refusals) > 20
    assert not any("\n" in each for each in refusals)
