"""The choices of vec_env=auto and n_envs=auto, and the number of cores they use."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Capture, only_run, small
from tiny_envs import CountingEnv

from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.assembly.run import train
from ml_pipeline.envs import choice, trial
from ml_pipeline.envs.choice import choose_mode, choose_n_envs
from ml_pipeline.envs.trial import EnvTrial, try_env
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv, WorkerStartError
from ml_pipeline.envs.workers.cores import available_cores, cgroup_cores


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only tests advance, so that a busy machine has no effect."""
    clock = SimpleNamespace(now=0.0)
    for module in (choice, trial):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class TimedEnv(CountingEnv):
    """A step takes ``seconds`` on the clock."""

    def __init__(self, clock: Any, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        self.clock.now += self.seconds
        return super().step(action)


def tried(clock: Any, seconds: float) -> EnvTrial:
    return try_env(partial(TimedEnv, clock, seconds), "timed", least_steps=20)


FAST, SLOW = 1e-6, 2e-3  # seconds of a step


def act(obs: Any, infos: Any) -> Any:
    return np.zeros(len(obs), dtype=np.int64)


def test_fast_envs_run_in_this_process_and_no_worker_is_started(clock: Any) -> None:
    def start_nothing(mode: str) -> ParallelEnv:
        raise AssertionError(f"{mode} was started")

    fast, slow = tried(clock, FAST), tried(clock, SLOW)
    chosen = choose_mode(start_nothing, fast, act, n_envs=8, n_slices=2)

    assert chosen == ("serial", "a turn takes 0.01 ms here, at best 0.03 ms with workers")
    assert choose_mode(start_nothing, slow, act, n_envs=1, n_slices=2)[0] == "serial"
    assert choose_mode(start_nothing, slow, act, n_envs=8, n_slices=1)[0] == "serial"


@pytest.mark.parametrize(
    ("parallel", "shared", "mode"),
    [(20e-3, 20e-3, "parallel"), (40e-3, 15e-3, "shared"), (0.2, 0.2, "serial")],
)
def test_the_fastest_mode_is_chosen_and_parallel_wins_a_tie_with_shared(
    clock: Any, parallel: float, shared: float, mode: str
) -> None:
    seconds = {"parallel": parallel, "shared": shared}

    def start(mode: str) -> SerialEnv:
        return SerialEnv([partial(TimedEnv, clock, seconds[mode])])

    chosen, reason = choose_mode(start, tried(clock, SLOW), act, n_envs=32, n_slices=4)

    assert chosen == mode
    assert "a turn took: serial" in reason
    assert "shared" in reason


def test_serial_is_chosen_with_the_reason_if_no_worker_can_start(clock: Any) -> None:
    def refuse(mode: str) -> ParallelEnv:
        raise WorkerStartError("no process left")

    chosen = choose_mode(refuse, tried(clock, SLOW), act, n_envs=8, n_slices=2)

    assert chosen == ("serial", "no process left")


def test_the_envs_run_in_this_process_if_workers_die_as_they_start(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(shutil.which("false") or ""))
    slow = ["env.target=tiny_envs.SlowEnv", "+env.kwargs.seconds=0.002"]

    assert train([*small(), *slow, "vec_env=auto", "vec_env.n_workers=2"]).env_steps == 64

    printed = capsys.readouterr().out
    # Both workers end at once, and either may be seen first.
    line = r"2 envs in this process \(the worker of env [01] ended with exit code 1"
    assert re.search(line, printed), printed


def test_a_slow_policy_gets_more_envs(clock: Any) -> None:
    def slow_act(obs: Any, infos: Any) -> Any:
        clock.now += 2e-3
        return act(obs, infos)

    fast, slow = tried(clock, FAST), tried(clock, SLOW)
    few, _ = choose_n_envs(slow, act, n_slices=2, allowed=lambda n: True)
    many, reason = choose_n_envs(fast, slow_act, n_slices=2, allowed=lambda n: True)

    assert few <= 4
    assert many == 64
    assert "n_envs=auto: expects about" in reason
    assert choose_n_envs(fast, act, n_slices=2, allowed=lambda n: n == 16)[0] == 16


def test_the_run_records_the_number_that_n_envs_auto_chose(here: Path) -> None:
    train([*small(), "n_envs=auto", "total_steps=4096"])

    assert plain_config(only_run(here))["n_envs"] in (2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"box/cpu.max": "150000 100000"}, "0::/box", 1.5),
        ({"cpu.max": "50000 100000", "box/cpu.max": "max 100000"}, "0::/box", 0.5),
        ({"cpu.max": "max 100000"}, "0::/", float("inf")),
        ({"cpu.max": "300000 100000"}, "0::/not/in/this/container", 3.0),
        (
            {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/job\n2:memory:/other",
            2.0,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            "1:cpu:/",
            float("inf"),
        ),
        ({"cpu.max": "unknown format"}, "0::/", float("inf")),
    ],
)
def test_the_cpu_quota_of_a_container_limits_the_cores(
    files: dict[str, str], own: str, cores: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")

    assert cgroup_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert cgroup_cores(tmp_path / "groups", tmp_path / "missing") == float("inf")
    assert available_cores() >= 1


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml_pipeline.envs.workers.cores.cgroup_cores", lambda *_: 8.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    assert available_cores() == 2
