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


def test_the_good_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, *GOOD]))

    bars, _ = read_bars([path])

    assert len(bars["X"].time) == 6


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named(tmp_path: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, *GOOD[:2], line, *GOOD[3:]]))

    text = refusal(path)

    assert text.startswith(f"{path}:4: ")
    assert any(each in text for each in reason.split("|"))


def test_blank_lines_count_in_the_number_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, GOOD[0], "", "", GOOD[1], GOOD[1], ""]))

    assert refusal(path).startswith(f"{path}:6: ")


def test_bad_bar_of_one_symbol_among_others_is_named_by_its_line(tmp_path: Path) -> None:
    text = (FILES / "table.csv").read_text().replace("20.5;22.5;20.0;22.0", "20.5;22.5;0;22.0")
    path = tmp_path / "X.csv"
    path.write_text(text)

    assert refusal(path).startswith(f"{path}:6: ")
    assert "low is not positive" in refusal(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (
            "when,open,high,low,last,volume",
            "it lacks time, close; found when open high low last volume; "
            "name them: env.kwargs.data.columns={time: NAME, close: NAME}",
        ),
        (
            "time,open,high,low,close,close",
            "it has close twice; found time open high low close close; "
            "name them: env.kwargs.data.columns={close: NAME}",
        ),
        (
            "timestamp,date,open,high,low,close",
            "it has time twice; found timestamp date open high low close; "
            "name them: env.kwargs.data.columns={time: NAME}",
        ),
        (
            "time|open|high|low|close|volume",
            "it lacks time, open, high, low, close; found time|open|high|low|close|volume; "
            "separate columns by commas, semicolons or tabs",
        ),
    ],
)
def test_unknown_header_is_refused_with_the_map_to_write(
    tmp_path: Path, header: str, reason: str
) -> None:
    path = tmp_path / "X.csv"
    path.write_text("\n".join([header, *GOOD]))

    assert refusal(path) == f"{path}:1: not a known layout: {reason}"


def test_named_column_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, *GOOD]))

    text = refusal(path, FileFormat(columns={"volume": "lots"}))
    assert "it lacks volume; found time open high low close volume; name them" in text


@pytest.mark.parametrize("text", ["", HEADER, "\n\n"])
def test_file_without_bars_is_too_short(tmp_path: Path, text: str) -> None:
    path = tmp_path / "X.csv"
    path.write_text(text)

    assert refusal(path).startswith(f"{path}: too short")


@pytest.mark.parametrize("content", [b"\0\0\n\0", b"x" * 200_000, b"\xff\xfet\0i\0m\0e\0"])
def test_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "X.csv"
    path.write_bytes(content)

    assert f"{path}:1: not a known layout: it lacks time, open, high, low, close" in refusal(path)


def test_one_bar_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text(f"{HEADER}\n{GOOD[0]}\n")

    assert "too short" in refusal(path)


def test_unknown_columns_without_a_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text("1704067200000,1,2,3\n")

    assert f"{path}:1: not a known layout: 4 columns" in refusal(path)


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
    ("options", "reason"),
    [
        ({"form": FileFormat("Mars/Olympus")}, "timezone=Mars/Olympus"),
        ({"symbols": ["Y"]}, "symbols=Y: not in the files; found X"),
        ({"further": ["signal"]}, "column signal is missing"),
        ({"length": 60_000_000_000}, "bar=1m: must be a multiple of the bars of X, which have 1h"),
    ],
)
def test_settings_that_do_not_fit_the_file_are_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "X.csv"
    path.write_text("\n".join([HEADER, *GOOD]))

    assert reason in refusal(path, **options)


def test_timezone_is_refused_where_times_have_one() -> None:
    path = FILES / "ccxt_plain.csv"

    assert "have a zone; remove the key" in refusal(path, FileFormat("Europe/Berlin"))


def test_label_is_refused_where_the_layout_decides() -> None:
    path = FILES / "BTCUSDT-1h-2024-12.csv"

    assert f"label=end: {path} looks like a file of binance" in refusal(
        path, FileFormat(label="end")
    )


def test_skipped_hour_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "X.csv"
    path.write_text(f"{HEADER}\n2024-03-31 01:00,1,1,1,1,1\n2024-03-31 02:30,1,1,1,1,1\n")

    text = refusal(path, FileFormat("Europe/Berlin"))
    assert f"{path}:3: the clock of Europe/Berlin skips this time" in text


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
