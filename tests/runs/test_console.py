"""ConsoleLogger: the lines that a run prints into a pipe."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import pytest
from conftest import Capture, read_rows, small
from rich.console import Console

from ml_pipeline.assembly.run import train
from ml_pipeline.metrics import shown_return
from ml_pipeline.runs import console
from ml_pipeline.runs.console import ConsoleLogger, say_if_slow, user_command


@pytest.mark.parametrize(
    ("total_steps", "line"),
    [
        (100, "total_steps=100: trains 96 env steps, 3 whole iterations of 32\n"),
        (95, "total_steps=95: trains 64 env steps, 2 whole iterations of 32\n"),
        (33, "total_steps=33: trains 32 env steps, one iteration of 32\n"),
        (5, "total_steps=5: trains 32 env steps, one iteration of 32\n"),
        (64, ""),
    ],
)
def test_rounded_total_steps_are_reported(
    total_steps: int, line: str, here: Path, capsys: Capture
) -> None:
    train([*small(total_steps=total_steps), "~callbacks.evaluation"])

    output = capsys.readouterr().out
    assert output.startswith(line + "CartPole-v1: 2 envs in this process, cpu\n")


def test_end_of_a_run_sums_up(here: Path, capsys: Capture) -> None:
    run = train(small(total_steps=640)).run_dir

    lines = capsys.readouterr().out.splitlines()
    row = read_rows(run)[-1]
    sums = {title: text.strip() for title, _, text in (line.partition(":") for line in lines)}
    n_episodes = int(float(row["rollout/total_episodes"]))
    assert sums["ran"] == "CartPole-v1: 2 envs in this process, cpu"
    assert re.fullmatch(
        rf"{n_episodes} episodes in 0:\d\d:\d\d; [\d,]+ env steps/s and [\d,.]+ episodes/s, "
        "evaluations included",
        sums["took"],
    )
    assert re.fullmatch(
        r"last [\d.]+, mean of the last 100 episodes [\d.]+, evaluation [\d.]+", sums["returns"]
    )


def test_slow_block_is_reported_once_it_takes_too_long(capsys: Capture) -> None:
    with say_if_slow("still trying", seconds=0.0):
        while "still trying" not in capsys.readouterr().out:  # else the timeout of the test
            time.sleep(0.01)
    with say_if_slow("still trying", seconds=3600.0):
        pass
    assert capsys.readouterr().out == ""


def test_command_names_the_script_by_its_shorter_path(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in ("/x/train_ppo.py", "../train_ppo.py"):
        monkeypatch.setattr(sys, "argv", [os.path.abspath(script)])
        assert user_command("train", python="python") == f"python {script}"


def test_command_names_the_script_of_the_agent_if_there_is_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train_sac.py").touch()
    monkeypatch.setattr(sys, "argv", ["train_ppo.py"])

    assert user_command("train", python="python", agent="sac") == "python train_sac.py"
    assert user_command("train", python="python", agent="mine") == "python train_ppo.py"


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("ml_pipeline/__main__.py train", "python -m ml_pipeline train"),
        ("/opt/bin/ml-pipeline train", "/opt/bin/ml-pipeline train"),
    ],
)
def test_command_names_the_program_that_runs(
    monkeypatch: pytest.MonkeyPatch, program: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program])

    assert user_command("train", python="python") == shown


@pytest.mark.parametrize(("steps", "bar"), [(0, "[---"), (500, "#----"), (1000, "###] ")])
def test_progress_bar_without_colours_shows_its_end(
    steps: int, bar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    logger = ConsoleLogger(1000, console=Console(file=output, force_terminal=True, width=100))
    logger.start()
    logger.log({}, env_steps=steps)
    logger.close()

    assert bar in output.getvalue()


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


def test_eta_of_dqn_and_sac_counts_only_the_time_since_the_first_updates(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    logger = ConsoleLogger(1000)
    logger.start()

    # Random actions until step 250; the iteration that ends at 300 has few updates.
    for seconds, env_steps, updates in [
        (3.0, 100, 0.0),
        (3.0, 200, 0.0),
        (4.0, 300, 5.0),
        (10.0, 400, 5.0),
        (10.0, 500, 0.0),  # few updates per env step: an iteration without one is slow, too
    ]:
        now += seconds
        logger.log({"time/updates_per_second": updates}, env_steps=env_steps)
    logger.close()

    etas = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert etas == ["ETA -", "ETA -", "ETA -", "ETA 0:01:00", "ETA 0:00:50"]


def test_terminal_shows_the_same_eta_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    screen = Console(file=io.StringIO(), force_terminal=True, width=119, color_system=None)
    logger = ConsoleLogger(1000, console=screen)

    logger.start()
    now += 60.0
    logger.log({"iteration": 1.0}, env_steps=100)
    logger.close()

    # The display is drawn at intervals, and once at its end.
    assert "ETA 0:09:00" in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "shows_kl"), [(119, False), (120, True)])
def test_wide_terminal_also_shows_the_kl_entropy_and_explained_variance(
    width: int, shows_kl: bool
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    logger = ConsoleLogger(1000, console=screen)
    learnt = {"policy/approx_kl": 0.01, "policy/entropy": 0.5, "value/explained_variance": 0.9}

    logger.start()
    logger.log({"rollout/episode_return": 12.5, **learnt}, env_steps=100)
    logger.close()

    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "return" in text
    assert "12.5" in text
    assert [word in text for word in ("0.0100", "0.500", "0.90")] == [shows_kl] * 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (500.0, "500.0"),
        (-1234.56, "-1234.6"),
        (9.1, "9.1"),
        (-0.0412, "-0.0412"),
        (0.0, "0.0"),
        (-1.0, "-1.0"),
    ],
)
def test_return_is_shown_with_the_digits_that_tell_something(value: float, text: str) -> None:
    assert shown_return(value) == text
