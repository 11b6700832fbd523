"""python -m ml_pipeline data PATH."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Capture, error_line
from market_rows import FILES

from ml_pipeline.__main__ import main


def test_symbols_spans_and_gaps_are_printed(capsys: Capture) -> None:
    assert main(["data", str(FILES / "yfinance_multi.csv")]) == 0

    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("yfinance_multi.csv: 1 file, bars of 1d, times are the ends in UTC")
    day = "2024-01-06 00:00:00  2024-01-11 00:00:00"
    assert [" ".join(row.split()) for row in rows] == [
        f"AAPL 4 {day} 1 2d".replace("  ", " "),
        f"BTC-USD 6 {day} 0 0d".replace("  ", " "),
    ]


def test_columns_can_be_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "X.csv"
    path.write_text((FILES / "ccxt_header.csv").read_text().replace("timestamp", "when"))

    assert main(["data", str(path), "--column", "time=when"]) == 0
    assert "bars of 1h" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["data", str(path), "--column", "when=time"])
    assert "must be OURS=NAME with time | open" in capsys.readouterr().err


def test_bad_file_is_one_line_and_exit_code_1(capsys: Capture) -> None:
    assert main(["data", str(FILES / "*M1_2024*.csv")]) == 1

    assert "MT5 writes the broker's time; set timezone" in error_line(capsys)
