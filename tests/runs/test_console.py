"""ConsoleLogger: the lines that a run prints into a pipe."""

from __future__ import annotations

import pytest

from ml_pipeline.runs import console
from ml_pipeline.runs.console import ConsoleLogger


def test_what_is_left_is_told_without_the_time_that_compiling_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    logger = ConsoleLogger(1000)
    logger.start()

    for seconds, env_steps in ((30.0, 100), (3.0, 200), (3.0, 300), (21.0, 1000)):
        clock[0] += seconds
        logger.log({"iteration": env_steps / 100}, env_steps=env_steps)
    logger.close()

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "ETA 0:04:30",  # 900 steps at 30 s per 100: nothing better is known yet
        "ETA 0:00:24",
        "ETA 0:00:21",
        "ETA 0:00:00",
    ]


def test_a_resumed_run_counts_from_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    logger = ConsoleLogger(1000, env_steps=500)
    logger.start()
    clock[0] += 10.0

    logger.log({}, env_steps=600)

    assert "env steps 600/1,000  ETA 0:00:40" in capsys.readouterr().out
