"""A stop signal ends a run within seconds, saved, whatever the run is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, TESTS, Start, await_line, only_run, small

from ml_pipeline.assembly.run import train
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals"),
]

SECONDS = 10.0
ON_POLICY = ["agent=ppo", "agent.n_steps=64", "agent.n_minibatches=1"]
OFF_POLICY = ["agent.learning_starts=2", "agent.iteration_length=64", "agent.batch_size=64"]
AGENTS = {
    "ppo": ON_POLICY,
    "dqn": ["agent=dqn", *OFF_POLICY],
    "sac": ["agent=sac", *OFF_POLICY],
    "td3": ["agent=td3", *OFF_POLICY],
    "pqn": ["agent=pqn", "agent.n_steps=64", "agent.n_minibatches=1"],
}


def settings(agent: str, env: str, seconds: float) -> list[str]:
    values = f"{{seconds: {seconds}, continuous: {agent in ('sac', 'td3')}}}"
    own = [f"env.target=stubborn_envs.{env}", f"+env.kwargs={values}"]
    base = small(n_envs=1, total_steps=100_000)
    kept = [each for each in base if not each.startswith(("agent.", "env."))]
    return [*AGENTS[agent], *own, *kept, "vec_env=serial", "~callbacks.evaluation"]


def stopped(started: Start, arguments: list[str], *numbers: signal.Signals) -> tuple[Any, float]:
    """The process, and the seconds from the first signal to its end."""
    process = started(*arguments)
    for line in ("run folder", "took a step", "took a step"):
        await_line(process, line)
    begin = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.7)  # a second signal within half a second counts as the same
    process.wait(60)
    return process, time.monotonic() - begin


@pytest.mark.parametrize("agent", ["ppo", "dqn"])  # SAC and TD3 collect as DQN does
def test_run_in_a_slow_env_stops_soon_and_is_saved(agent: str, started: Start, here: Path) -> None:
    process, seconds = stopped(started, settings(agent, "Slow", 0.4), signal.SIGTERM)

    assert process.returncode == 128 + signal.SIGTERM
    assert seconds < SECONDS
    assert load_checkpoint(RunFolder.open(only_run(here)), LATEST)["iteration"] == 0


@pytest.mark.parametrize(
    ("agent", "more"),
    [
        ("ppo", ["agent.fast=auto"]),
        ("ppo", ["agent.fast=off"]),
        ("dqn", ["agent.fast=auto"]),
        ("dqn", ["agent.fast=off"]),
        ("sac", ["agent.fast=auto"]),
        ("td3", []),
        ("pqn", []),
    ],
)
def test_run_with_very_many_updates_stops_between_two_of_them_and_continues(
    agent: str, more: list[str], started: Start, here: Path
) -> None:
    updates = "agent.n_epochs" if agent in ("ppo", "pqn") else "agent.updates_per_env_step"
    arguments = [*settings(agent, "Slow", 0.0), f"{updates}=20000", *more]

    process, seconds = stopped(started, arguments, signal.SIGTERM)

    assert process.returncode == 128 + signal.SIGTERM
    assert seconds < SECONDS
    run = RunFolder.open(only_run(here))
    state = load_checkpoint(run, LATEST)
    assert state["iteration"] == 0
    assert state.get("n_updates", 1) > 0
    assert train([f"resume={run.path}", "total_steps=64", f"{updates}=1"]).env_steps == 64


def test_stop_that_an_env_swallows_is_raised_again(started: Start, here: Path) -> None:
    arguments = [*settings("ppo", "Swallowing", 0.4), "agent.n_steps=8"]

    process, seconds = stopped(started, arguments, signal.SIGTERM, signal.SIGTERM)

    assert process.returncode == 128 + signal.SIGTERM
    assert seconds < 2 * SECONDS
    assert load_checkpoint(RunFolder.open(only_run(here)), LATEST)["iteration"] <= 2


def test_evaluation_stops_although_its_env_swallows_the_signal(here: Path) -> None:
    own = settings("ppo", "Swallowing", 0.0)
    run = train([*own, "agent.n_steps=8", "total_steps=8"]).run_dir
    process = subprocess.Popen(
        [sys.executable, "-m", "ml_pipeline", "evaluate", str(run)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{TESTS}", "STUBBORN_SECONDS": "0.4"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        await_line(process, "took a step")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 128 + signal.SIGINT
        assert time.monotonic() - begin < 2 * SECONDS
    finally:
        process.kill()
        process.communicate()
