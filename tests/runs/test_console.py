"""ConsoleLogger: the lines that a run prints into a pipe."""

from __future__ import annotations

import pytest
from conftest import Capture

from ml_pipeline.runs import console
from ml_pipeline.runs.console import ConsoleLogger


@pytest.mark.parametrize(
    ("first_step", "moments", "expected"),
    [
        (
            0,
            [(30.0, 100), (3.0, 200), (3.0, 300), (21.0, 1000)],
            # 900 steps at 30 s per 100; then without the first iteration, which compiles.
            ["0:04:30", "0:00:24", "0:00:21", "0:00:00"],
        ),
        (500, [(10.0, 600)], ["0:00:40"]),
    ],
    ids=["new run", "resumed run"],
)
def test_eta_counts_this_process_only_and_not_the_iteration_that_compiles(
    first_step: int,
    moments: list[tuple[float, int]],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    logger = ConsoleLogger(1000, env_steps=first_step)
    logger.start()

    for seconds, env_steps in moments:
        now += seconds
        logger.log({"iteration": env_steps / 100}, env_steps=env_steps)
    logger.close()

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        [f"env steps {env_steps:,}/1,000", f"ETA {eta}"]
        for (_, env_steps), eta in zip(moments, expected, strict=True)
    ]
