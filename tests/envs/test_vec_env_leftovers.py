"""ParallelEnv leaves nothing behind when a program ends or is killed, or after many envs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
from conftest import TESTS, wait_until, wait_until_gone
from vec_envs import linux_only


def printed_by(program: str, *arguments: str) -> str:
    """Run in a new process: objects of other tests hold memory and descriptors in this one."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=TESTS,
        timeout=110,
    )
    assert result.stderr == ""
    return result.stdout


NEVER_CLOSE = """
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import CountingEnv
env = ParallelEnv([CountingEnv] * 2, n_workers=2)
env.reset()
print(*env.worker_pids)
"""


def test_workers_end_silently_with_a_program_that_never_closed_them() -> None:
    pids = printed_by(NEVER_CLOSE).split()

    wait_until_gone([int(pid) for pid in pids])


HOLD = """
import sys, time
from functools import partial
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import FaultyEnv
fault, start_method = sys.argv[1:]
env_fns = [partial(FaultyEnv, fault, 8)] * 4
first = ParallelEnv(env_fns, seed=7, n_workers=1, start_method=start_method)
env = ParallelEnv(env_fns, seed=7, n_workers=2, start_method=start_method)
env.reset()
env.step([0] * 4)
env.step_async([0] * 4)
print(*first.worker_pids, *env.worker_pids, flush=True)
time.sleep(1000)
"""


def hold(fault: str, start_method: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program with two ParallelEnvs, one of them in the middle of a step, and its worker pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, fault, start_method],
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.stdout.close()
    assert len(pids) == 3
    return process, pids


@pytest.mark.parametrize(
    ("start_method", "fault"),
    [
        ("spawn", "hang"),
        pytest.param("fork", "stop", marks=linux_only),
        pytest.param("forkserver", "hang in C", marks=linux_only),
        *(
            pytest.param(start, fault, marks=[pytest.mark.slow, linux_only])
            for start, fault in [
                ("spawn", "hang in C"),
                ("spawn", "stop"),
                ("fork", "nothing"),
                ("fork", "hang"),
                ("forkserver", "nothing"),
            ]
        ),
    ],
)
def test_workers_end_when_the_trainer_is_killed(start_method: str, fault: str) -> None:
    process, pids = hold(fault, start_method)

    process.kill()
    process.wait()

    wait_until_gone(pids)


def shared_names() -> set[str]:
    """Names in shared memory, except those of joblib, which another test may be using."""
    return {name for name in os.listdir("/dev/shm") if "loky" not in name and "joblib" not in name}


@linux_only
@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_a_process_group_that_is_killed_leaves_no_files(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shared_before = shared_names()
    process, pids = hold("nothing", start_method)

    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    wait_until_gone(pids)
    wait_until(lambda: shared_names() <= shared_before)  # other programs may add some for a moment
    assert list(temporary.iterdir()) == []


COUNT_DESCRIPTORS = """
import gc, multiprocessing, os, signal, sys
from ml_pipeline.envs.vec_env import ParallelEnv, WorkerError
from tiny_envs import CountingEnv

gc.disable()  # close must free everything by itself
errors = []  # their tracebacks keep every env alive, and with it one descriptor of its memory

def cycle(loses_a_worker):
    env = ParallelEnv([CountingEnv] * 2, start_method="fork", n_workers=2)
    env.reset(seed=1)
    if loses_a_worker:
        os.kill(env.worker_pids[0], signal.SIGKILL)
        try:
            env.step(env.action_space.sample())
        except WorkerError as error:
            errors.append(error)
    env.close()
    assert not multiprocessing.active_children()
    return len(os.listdir("/proc/self/fd"))

print([cycle(sys.argv[2] == "lost") for _ in range(int(sys.argv[1]))])
"""


@linux_only
@pytest.mark.parametrize(
    ("n_envs", "worker"),
    [(20, "alive"), (20, "lost"), pytest.param(200, "alive", marks=pytest.mark.slow)],
)
def test_many_envs_in_a_row_leak_no_descriptor_and_no_child(n_envs: int, worker: str) -> None:
    counts = literal_eval(printed_by(COUNT_DESCRIPTORS, str(n_envs), worker))

    growth = 1 if worker == "lost" else 0
    # The first env may open descriptors that stay open.
    assert counts[1:] == [counts[1] + growth * i for i in range(n_envs - 1)]


GROW = """
from functools import partial
from pathlib import Path
import numpy as np
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import CountingEnv

def megabytes():
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return [own, *(load.rss_mb for load in env.worker_loads())]

env = ParallelEnv([partial(CountingEnv, 50)] * 32, start_method="fork", n_workers=2, seed=1)
actions = np.zeros(32, dtype=np.int64)
env.reset()
for _ in range(500):
    env.step(actions)
before = megabytes()
for _ in range(20_000):
    env.step(actions)
after = megabytes()
env.close()
print([b - a for a, b in zip(before, after)])
"""


@linux_only
@pytest.mark.slow
def test_memory_does_not_grow_in_20_000_steps_of_32_envs() -> None:
    grown = literal_eval(printed_by(GROW))

    assert len(grown) == 3
    assert max(grown) < 1.0  # less than two bytes per step of an env
