"""The worker processes of ParallelEnv: how they start, how they end, and what they leave behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from ast import literal_eval
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS, wait_until, wait_until_gone
from faulty_envs import BulkyEnv
from tiny_envs import CountingEnv, FaultyEnv
from vec_envs import (
    answers_within,
    each_start,
    forked,
    four_envs,
    leaves_no_child,  # noqa: F401
    zeros,
)

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import AnswerPendingError, ParallelEnv, WorkerStartError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@each_start
@pytest.mark.parametrize(
    "state", ["new", "pending", "stuck", "stopped", "dead", "raised", "stuck in close"]
)
def test_close_returns_from_any_state(start_method: Any, n_workers: int, state: str) -> None:
    faults = {"stuck": "hang", "stopped": "stop", "dead": "kill", "raised": "raise"}
    where = "close" if state == "stuck in close" else "step"
    fault = "hang" if state == "stuck in close" else faults.get(state, "nothing")
    env = four_envs(fault, where, start_method=start_method, n_workers=n_workers)
    pids = env.worker_pids
    if state != "new":
        env.reset()
        env.step(zeros(env))
        env.step_async(zeros(env))
    if state == "raised":
        with pytest.raises(LookupError):
            env.step_wait()
    if state in ("stuck", "stopped"):
        with pytest.raises(AnswerPendingError):  # by now the worker is in its step
            env.step_wait(timeout=0.3)

    with answers_within(30):
        env.close() if n_workers == 1 else env.close(timeout=0.3)
        env.close()

    wait_until_gone(pids)


def test_close_with_terminate_does_not_wait() -> None:
    env = four_envs("hang", "close", start_method="fork", n_workers=2)
    env.reset()

    with answers_within(30):
        env.close(timeout=60, terminate=True)


def test_close_lets_an_env_close_although_a_large_reply_is_pending(tmp_path: Path) -> None:
    env = forked([partial(BulkyEnv, tmp_path / "closed")])
    env.reset(seed=1)
    env.step_async(zeros(env))

    env.close(timeout=60)

    assert (tmp_path / "closed").exists()


def test_a_stuck_worker_does_not_keep_others_from_closing_their_envs(tmp_path: Path) -> None:
    env_fns = [partial(FaultyEnv, "hang", 7, "step"), partial(BulkyEnv, tmp_path / "closed")]
    env = forked(env_fns, seed=7)
    env.reset()
    env.step(zeros(env))
    env.step_async(zeros(env))
    with pytest.raises(AnswerPendingError):
        env.step_wait(timeout=0.3)

    env.close(timeout=1.5)

    assert (tmp_path / "closed").exists()


def test_workers_end_when_their_env_is_collected() -> None:
    env = forked([CountingEnv] * 2)
    pids = env.worker_pids

    del env
    gc.collect()

    assert not [process for process in multiprocessing.active_children() if process.pid in pids]


@pytest.mark.parametrize("way", ["close", "collect"])
def test_a_forked_copy_of_the_parent_does_not_end_the_workers(way: str) -> None:
    env = forked([CountingEnv] * 2, seed=1)
    env.reset()
    pid = os.fork()
    if pid == 0:
        try:
            if way == "close":
                env.close()
            del env
            gc.collect()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]
    env.close()


def test_workers_outlive_the_thread_that_started_them() -> None:
    made: list[ParallelEnv] = []
    thread = threading.Thread(target=lambda: made.append(forked([CountingEnv] * 2, seed=1)))
    thread.start()
    thread.join()

    made[0].reset()
    assert made[0].step(zeros(made[0]))[0][:, 0].tolist() == [1.0, 1.0]
    made.pop().close()


class IgnoredSignals(CountingEnv):
    def ignored_by_a_child(self) -> list[str]:
        """The stop signals that a program ignores if this env starts it."""
        program = (
            "import signal as s; "
            "print([n for n in ('SIGTERM', 'SIGHUP') if s.getsignal(s.Signals[n]) is s.SIG_IGN])"
        )
        command = [sys.executable, "-S", "-c", program]
        return list(literal_eval(subprocess.run(command, capture_output=True, text=True).stdout))


@each_start
def test_workers_survive_stop_signals_but_their_child_processes_do_not_ignore_them(
    start_method: Any, n_workers: int
) -> None:
    env = ParallelEnv([IgnoredSignals] * 4, start_method=start_method, n_workers=n_workers)
    env.reset()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in env.worker_pids:
            os.kill(pid, number)
        env.step(zeros(env))

    assert env.call("ignored_by_a_child") == ([],) * 4
    env.close()


class GloballyRandom(CountingEnv):
    def _observe(self) -> Any:
        return np.array([random.random(), np.random.random()], dtype=np.float32)


@pytest.mark.parametrize("seed", [5, None])
def test_global_generators_differ_between_workers(seed: int | None) -> None:
    def drawn() -> list[float]:
        env = forked([GloballyRandom] * 2, seed=seed)
        numbers = [float(each) for each in env.reset()[0].ravel()]
        env.close()
        return numbers

    first, second = drawn(), drawn()

    assert len(set(first)) == 4
    assert (first == second) == (seed is not None)


def test_a_spawned_worker_has_no_torch_and_stays_small() -> None:
    env_fns = [EnvFactory("CartPole-v1"), EnvFactory(None, target="faulty_envs.WorkerModules")]
    cartpole = ParallelEnv(env_fns[:1])
    cartpole.reset(seed=1)
    modules = ParallelEnv(env_fns[1:])

    assert modules.call("has_module", "torch") == (False,)
    if Path("/proc").exists():
        status = Path(f"/proc/{cartpole.worker_pids[0]}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        assert kilobytes < 55_000
    cartpole.close()
    modules.close()


@linux_only
def test_the_default_start_method_of_the_program_has_no_effect() -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)  # joblib's launcher leaves "loky"
    try:
        env = ParallelEnv([CountingEnv])
        command = Path(f"/proc/{env.worker_pids[0]}/cmdline").read_text()
        env.close()
    finally:
        multiprocessing.set_start_method(before, force=True)

    assert "spawn_main" in command


@pytest.mark.slow
def test_workers_start_inside_joblibs_loky() -> None:
    joblib = pytest.importorskip("joblib", reason="joblib has the loky start method")

    def job(seed: int) -> list[float]:
        env = ParallelEnv([CountingEnv] * 2, n_workers=2, seed=seed)
        env.reset()
        obs = env.step(np.zeros(2, dtype=np.int64))[0]
        env.close()
        return [float(value) for value in obs[:, 0]]

    results = joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(job)(i) for i in range(2))

    assert results == [[1.0, 1.0], [1.0, 1.0]]
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


def test_a_daemonic_process_cannot_start_workers_and_the_error_says_what_to_do() -> None:
    def child(queue: Any) -> None:
        try:
            ParallelEnv([CountingEnv], start_method="fork")
        except WorkerStartError as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,), daemon=True)
    process.start()
    process.join(10)

    assert "a daemonic process cannot start workers; use SerialEnv" in queue.get()
    queue.close()


def test_the_error_names_the_worker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)

    with pytest.raises(WorkerStartError, match=r"worker 1 of 2 cannot be started: .*SerialEnv"):
        ParallelEnv([CountingEnv] * 2, n_workers=2)


def test_workers_end_with_a_program_that_never_closed_them(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import CountingEnv
if __name__ == "__main__":
    env = ParallelEnv([CountingEnv] * 2, n_workers=2, seed=1)
    env.reset()
    print(*env.worker_pids)
"""
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )

    assert result.stderr == ""
    wait_until_gone([int(pid) for pid in result.stdout.split()])


HOLD = """
import os, sys, time
sys.path.insert(0, {tests!r})
from functools import partial
import numpy as np
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import FaultyEnv
if __name__ == "__main__":
    env_fns = [partial(FaultyEnv, {fault!r}, 8)] * 4
    first = ParallelEnv(env_fns, seed=7, n_workers=1, start_method={start!r})
    env = ParallelEnv(env_fns, seed=7, n_workers=2, start_method={start!r})
    env.reset(); env.step(np.zeros(4, dtype=np.int64)); env.step_async(np.zeros(4, dtype=np.int64))
    print(*first.worker_pids, *env.worker_pids, flush=True)
    time.sleep(1000)
"""


def hold(tmp_path: Path, fault: str, start_method: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program with two ParallelEnvs, one of them in the middle of a step; and its workers."""
    script = tmp_path / "hold.py"
    script.write_text(HOLD.format(tests=str(TESTS), fault=fault, start=start_method))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
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
            for start in ("spawn", "fork", "forkserver")
            for fault in ("nothing", "hang", "hang in C", "stop")
            if (start, fault)
            not in [("spawn", "hang"), ("fork", "stop"), ("forkserver", "hang in C")]
        ),
    ],
)
def test_workers_end_when_the_trainer_is_killed(
    start_method: str, fault: str, tmp_path: Path
) -> None:
    process, pids = hold(tmp_path, fault, start_method)

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
    process, pids = hold(tmp_path, "nothing", start_method)

    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    wait_until_gone(pids)
    wait_until(lambda: shared_names() <= shared_before)  # other programs may add some for a moment
    assert list(temporary.iterdir()) == []


def printed_by(program: str, *arguments: str, timeout: float = 110) -> str:
    """Run in a new process: objects of other tests hold memory and descriptors in this one."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=TESTS,
        timeout=timeout,
    )
    return result.stdout


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
    [(20, "alive"), (20, "lost"), pytest.param(1000, "alive", marks=pytest.mark.slow)],
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

env = ParallelEnv([partial(CountingEnv, 50)] * 512, start_method="fork", n_workers=2, seed=1)
actions = np.zeros(512, dtype=np.int64)
env.reset()
for _ in range(500):
    env.step(actions)
before = megabytes()
for _ in range(10_000_000 // 512):
    env.step(actions)
after = megabytes()
env.close()
print([b - a for a, b in zip(before, after)])
"""


@linux_only
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_does_not_grow_in_ten_million_steps() -> None:
    grown = literal_eval(printed_by(GROW, timeout=580))

    assert len(grown) == 3
    assert max(grown) < 1.0
