"""The worker processes of ParallelEnv: how they start, what they run, and how they end."""

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
from conftest import Make, wait_until_gone
from faulty_envs import BulkyEnv, Colour, MovingEnv, ThreadEnv, WorkerModules
from gymnasium.error import ClosedEnvironmentError
from tiny_envs import CountingEnv, FaultyEnv
from vec_envs import (
    answers_within,
    each_start,
    each_start_mostly_slow,
    forked,
    four_envs,
    linux_only,
    zeros,
)

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import AnswerPendingError, ParallelEnv, WorkerError, WorkerStartError

pytestmark = pytest.mark.usefixtures("leaves_no_child")


@each_start_mostly_slow
@pytest.mark.parametrize(
    ("fault", "where", "error"),
    [
        ("nothing", "new", None),
        ("nothing", "step", None),  # its result is pending
        ("hang", "step", AnswerPendingError),
        ("stop", "step", AnswerPendingError),
        ("kill", "step", None),
        ("raise", "step", LookupError),
        ("hang", "close", None),
    ],
)
def test_close_works_in_any_state(make: Make, fault: str, where: str, error: Any) -> None:
    env = make(four_envs(fault, where), seed=7)
    pids = env.worker_pids
    if where != "new":
        env.reset()
        env.step(zeros(env))
        env.step_async(zeros(env))
    if error is not None:
        with pytest.raises(error):  # by now the worker is in its step
            env.step_wait(timeout=0.3 if error is AnswerPendingError else None)

    with answers_within(30):
        env.close() if env.n_workers == 1 else env.close(timeout=0.3)
        env.close()

    wait_until_gone(pids)


def test_close_with_terminate_does_not_wait(start: Make) -> None:
    env = start(four_envs("hang", "close"), seed=7)

    with answers_within(30):
        env.close(timeout=60, terminate=True)


@each_start
def test_close_does_not_wait_for_threads_of_the_envs(start: Make) -> None:
    env = start([ThreadEnv] * 4)
    pids = env.worker_pids

    with answers_within(30):
        env.close(timeout=60)
    wait_until_gone(pids)


@pytest.mark.parametrize(
    "start_method",
    ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spawn", "forkserver"))],
)
def test_an_env_may_change_the_current_folder_and_remove_it(
    start: Make, start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back after the test
    env = start(
        [MovingEnv] * 4, start_method=start_method, main_slice=True, on_worker_death="restart"
    )
    env.step(zeros(env))
    env.step(zeros(env))
    os.kill(env.worker_pids[0], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="restart 1 of"):
        env.step(zeros(env))
    env.step(zeros(env))

    env.resize(2)
    env.resize(4)

    assert env.call("folder")[2:] == (str(tmp_path),) * 2, "in the new worker"


def test_an_env_is_closed_even_if_a_large_reply_is_pending(start: Make, tmp_path: Path) -> None:
    env = start([partial(BulkyEnv, tmp_path / "closed")])
    env.step_async(zeros(env))

    env.close(timeout=60)

    assert (tmp_path / "closed").exists()


def test_a_stuck_worker_does_not_keep_others_from_closing(start: Make, tmp_path: Path) -> None:
    env_fns = [partial(FaultyEnv, "hang", 7, "step"), partial(BulkyEnv, tmp_path / "closed")]
    env = start(env_fns, seed=7)
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


@pytest.mark.parametrize("act", ["step", "close", "collect"])
def test_a_forked_copy_of_the_parent_can_neither_step_nor_end_the_workers(act: str) -> None:
    env = forked([CountingEnv] * 2)
    env.reset()
    pid = os.fork()
    if pid == 0:
        try:
            if act == "step":
                with pytest.raises(WorkerError, match="forked copy"):
                    env.step(zeros(env))
            if act == "close":
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


def test_workers_outlive_the_thread_that_started_them(start: Make) -> None:
    made: list[ParallelEnv] = []
    thread = threading.Thread(target=lambda: made.append(start([CountingEnv] * 2)))
    thread.start()
    thread.join()

    assert made[0].step(zeros(made[0]))[0][:, 0].tolist() == [1.0, 1.0]


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
def test_workers_ignore_stop_signals_and_their_child_processes_do_not(start: Make) -> None:
    env = start([IgnoredSignals] * 4)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in env.worker_pids:
            os.kill(pid, number)
        env.step(zeros(env))

    assert env.call("ignored_by_a_child") == ([],) * 4


class GloballyRandom(CountingEnv):
    def _observe(self) -> Any:
        return np.array([random.random(), np.random.random()], dtype=np.float32)


@pytest.mark.parametrize("seed", [5, None])
def test_global_generators_differ_between_workers(make: Make, seed: int | None) -> None:
    envs = [make([GloballyRandom] * 2, seed=seed) for _ in range(2)]

    first, second = (env.reset()[0].ravel().tolist() for env in envs)

    assert len(set(first)) == 4
    assert (first == second) == (seed is not None)


@pytest.mark.parametrize("way", [ParallelEnv])
def test_a_spawned_worker_has_no_torch_and_stays_small(start: Make) -> None:
    cartpole = start([EnvFactory("CartPole-v1")])
    modules = start([EnvFactory(None, target="faulty_envs.WorkerModules")])

    assert modules.call("has_module", "torch") == (False,)
    if Path("/proc").exists():
        status = Path(f"/proc/{cartpole.worker_pids[0]}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        assert kilobytes < 55_000


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


def test_actions_of_a_class_of_the_main_script_reach_a_spawned_worker(start: Make) -> None:
    class Move:
        pass

    class MoveSpace(Colour):
        def contains(self, x: Any) -> bool:
            return isinstance(x, Move)

    class MovingEnv(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = MoveSpace()

        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, float(isinstance(action, Move)), *rest

    env = start([MovingEnv] * 2, start_method="spawn")

    assert env.step((Move(), Move()))[1].tolist() == [1.0, 1.0]


def test_a_factory_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    with pytest.raises(WorkerError, match=r"env 0 cannot be sent to a worker: .*lock"):
        ParallelEnv([lambda: CountingEnv(length=id(lock))])


def test_a_worker_runs_several_neighbouring_envs(make: Make) -> None:
    env = make([WorkerModules] * 5)

    assert list(env.call("pid")) == [env.worker_pids[0]] * 2 + [env.worker_pids[1]] * 3
    assert [load.rows for load in env.worker_loads()] == [[0, 1], [2, 3, 4]]
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.worker_loads()


def test_two_parallel_envs_do_not_disturb_each_other(start: Make) -> None:
    first, second = (start([CountingEnv] * 2) for _ in range(2))
    first.step(zeros(first))
    first.close()

    assert second.step(zeros(second))[0][:, 0].tolist() == [1.0, 1.0]


def test_64_envs_in_16_workers(start: Make) -> None:
    env = start([CountingEnv] * 64, n_workers=16, seed=1)

    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0] * 64
