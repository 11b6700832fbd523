"""What ParallelEnv promises when envs raise, die, hang or lie; real processes, real signals.

The bounds on seconds are wide: they tell an answer from a hang. How long an answer takes is
measured by benchmarks/vec_env.py.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from ast import literal_eval
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS, wait_until, wait_until_gone
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from tiny_envs import (
    BigInfoEnv,
    BulkyEnv,
    CodedError,
    CountingEnv,
    FaultyEnv,
    GatedEnv,
    NoisyEnv,
    PrintingEnv,
    RaisingEnv,
    SlowEnv,
    SpaceEnv,
    UnpicklableEnv,
    faulty_factory,
    make_broken,
)

from ml_pipeline.envs.vec_env import (
    AnswerPendingError,
    ParallelEnv,
    SerialEnv,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

# Starting workers takes a while, so that some of the pairs are left to the slow tests.
STARTS = pytest.mark.parametrize(
    ("start_method", "n_workers"),
    [
        ("fork", 1),
        ("fork", 4),
        ("spawn", 2),
        pytest.param("fork", 2, marks=pytest.mark.slow),
        pytest.param("spawn", 1, marks=pytest.mark.slow),
        pytest.param("spawn", 4, marks=pytest.mark.slow),
    ],
)
CULPRIT = 10  # seed of env 3, the last of four
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def zeros(env: Any) -> Any:
    return np.zeros(env.num_envs, dtype=np.int64)


def four_envs(fault: str, where: str = "step", **options: Any) -> ParallelEnv:
    return ParallelEnv([partial(FaultyEnv, fault, CULPRIT, where)] * 4, seed=7, **options)


def make_and_play(fault: str, where: str, **options: Any) -> None:
    """Make four envs and do with them all that can be done; closes them whatever happens."""
    if where == "factory":
        env_fns = [partial(faulty_factory, fault, i == 3) for i in range(4)]
        ParallelEnv(env_fns, seed=7, **options).close()
        return
    env = four_envs(fault, where, **options)
    try:
        env.reset()
        env.step(zeros(env))
        env.step(zeros(env))
        env.call("poke")
    finally:
        env.close(timeout=0.5)


@contextlib.contextmanager
def answers_within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """Other tests have imported half the world by now, and each test here looks for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_no_child() -> Iterator[None]:
    yield
    gc.collect()
    assert not multiprocessing.active_children()


@STARTS
def test_a_raise_names_the_env_and_can_be_caught_as_what_was_raised(
    start_method: Any, n_workers: int
) -> None:
    env = four_envs("raise", start_method=start_method, n_workers=n_workers)
    env.reset()
    env.step(zeros(env))

    with answers_within(30), pytest.raises(LookupError, match="puck left") as caught:
        env.step(zeros(env))

    assert isinstance(caught.value, WorkerError)
    assert "env 3 (seed 10) raised:" in str(caught.value)
    assert "in misbehave" in str(caught.value), "the worker's traceback is shown"
    assert type(caught.value.__cause__) is LookupError
    assert env.step(zeros(env))[0][3, 0] == 3.0, "the env goes on where it was"
    env.close()


@STARTS
@pytest.mark.parametrize("where", ["factory", "reset", "call"])
def test_a_raise_elsewhere_is_named_too(start_method: Any, n_workers: int, where: str) -> None:
    with pytest.raises(LookupError, match=r"env 3 \(seed 10\) raised:[\s\S]*puck left"):
        make_and_play("raise", where, start_method=start_method, n_workers=n_workers)


def test_a_raise_is_told_at_once_although_others_still_work() -> None:
    env_fns = [partial(SlowEnv, 60.0), partial(FaultyEnv, "raise", 8)]
    env = ParallelEnv(env_fns, seed=7, n_workers=2, start_method="fork")
    env.reset()
    env.set_attr("seconds", [0.0, 0.0])
    env.step(zeros(env))
    env.set_attr("seconds", [60.0, 0.0])

    with answers_within(30), pytest.raises(LookupError):
        env.step(zeros(env))
    env.close()


def test_what_cannot_be_caught_as_its_own_type_is_still_told() -> None:
    for fault, words in [("odd exception", "OddError"), ("interrupt", "KeyboardInterrupt")]:
        env = four_envs(fault, start_method="fork", n_workers=2)
        env.reset()
        env.step(zeros(env))
        with pytest.raises(WorkerError, match=rf"env 3 \(seed 10\) raised:[\s\S]*{words}"):
            env.step(zeros(env))
        env.close()


@STARTS
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segfault", "was killed by SIGSEGV"),
        ("exit", "ended with exit code 7"),
        ("sys.exit", "SystemExit: 3"),
    ],
)
def test_a_death_is_told_with_its_envs_and_how_it_came(
    start_method: Any, n_workers: int, fault: str, words: str
) -> None:
    env = four_envs(fault, start_method=start_method, n_workers=n_workers)
    env.reset()
    env.step(zeros(env))

    with answers_within(30), pytest.raises(WorkerError, match=words) as caught:
        env.step(zeros(env))

    envs = {1: "envs 0-3", 2: "envs 2-3", 4: "env 3"}[n_workers]
    assert envs in str(caught.value) or fault == "sys.exit"
    if fault != "sys.exit":
        with answers_within(30), pytest.raises(WorkerError, match=words):
            env.step(zeros(env))
    with answers_within(30):
        env.close()


@linux_only
def test_a_death_is_told_although_a_child_of_the_env_holds_the_line_open(tmp_path: Path) -> None:
    class ForkingEnv(CountingEnv):
        def step(self, action: Any) -> Any:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os._exit(5)

    env = ParallelEnv([ForkingEnv], start_method="fork")
    env.reset(seed=1)
    with answers_within(30), pytest.raises(WorkerError, match="exit code 5"):
        env.step(zeros(env))
    env.close()
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@STARTS
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("hang", "factory"),
        ("hang", "reset"),
        ("hang", "step"),
        ("hang in C", "step"),
        ("stop", "step"),
        ("hang", "call"),
    ],
)
def test_a_stuck_or_stopped_worker_is_an_error_after_the_deadline(
    start_method: Any, n_workers: int, fault: str, where: str
) -> None:
    with answers_within(8), pytest.raises(WorkerTimeoutError, match=r"within 0.5 s and was ended"):
        make_and_play(
            fault, where, start_method=start_method, n_workers=n_workers, step_timeout=0.5
        )


def test_a_worker_that_hangs_before_it_takes_a_large_factory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A spawned worker imports the main script first; this one never comes to an end.
    script = tmp_path / "endless.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
if __name__ != "__main__":
    time.sleep(1000)
from ml_pipeline.envs.workers import pool as worker_pool
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import CountingEnv
worker_pool._START_SECONDS = 1.0
class Heavy(CountingEnv):
    ballast = bytes(8_000_000)
ParallelEnv([Heavy], step_timeout=0.5)
"""
    )
    with answers_within(20):
        result = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
        )

    assert result.returncode == 1
    assert "WorkerTimeoutError: the worker of env 0 has not answered within 1.0 s" in result.stderr


@STARTS
@pytest.mark.parametrize(
    "state", ["new", "pending", "stuck", "stopped", "dead", "raised", "stuck in close"]
)
def test_close_returns_from_any_state_and_leaves_no_child(
    start_method: Any, n_workers: int, state: str
) -> None:
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
        with pytest.raises(AnswerPendingError):  # it has begun its step, and is so by now
            env.step_wait(timeout=0.5)

    with answers_within(30):
        env.close(timeout=0.3) if n_workers == 4 else env.close()
        env.close()

    wait_until_gone(pids)
    for call in (env.reset, lambda: env.step(zeros(env)), lambda: env.get_attr("length")):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_close_with_terminate_asks_nobody() -> None:
    env = four_envs("hang", "close", start_method="fork", n_workers=2)
    env.reset()

    with answers_within(30):
        env.close(timeout=60, terminate=True)


def test_a_step_that_is_waited_for_in_vain_can_be_waited_for_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = ParallelEnv([partial(GatedEnv, gate)] * 2, start_method="fork", n_workers=2, seed=1)
    env.reset()
    env.step_async(zeros(env))
    for error in (TimeoutError, multiprocessing.TimeoutError, WorkerError):
        with pytest.raises(error, match=r"no answer of envs 0-1 within 0.01 s"):
            env.step_wait(timeout=0.01)

    gate.touch()
    assert env.step_wait()[0][:, 0].tolist() == [1.0, 1.0]
    env.reset_async(seed=1)
    assert env.reset_wait(timeout=30)[0][:, 0].tolist() == [0.0, 0.0]
    env.call_async("get_wrapper_attr", "length")
    assert env.call_wait(timeout=30) == (3, 3)
    env.close()


def test_an_env_that_was_never_closed_ends_with_the_program(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
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
    first = ParallelEnv(env_fns, seed=7, n_workers=2, start_method={start!r})
    env = ParallelEnv(env_fns, seed=7, n_workers=4, start_method={start!r})
    env.reset(); env.step(np.zeros(4, dtype=np.int64)); env.step_async(np.zeros(4, dtype=np.int64))
    print(*first.worker_pids, *env.worker_pids, flush=True)
    time.sleep(1000)
"""


def held(tmp_path: Path, fault: str, start_method: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program with two ParallelEnvs, one of them in the middle of a step; and its workers."""
    script = tmp_path / "hold.py"
    script.write_text(
        HOLD.format(tests=str(Path(__file__).parents[1]), fault=fault, start=start_method)
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.stdout.close()
    assert len(pids) == 6
    return process, pids


@pytest.mark.parametrize(
    ("start_method", "fault"),
    [
        *((start, fault) for start in ("spawn", "fork") for fault in ("nothing", "hang")),
        ("forkserver", "hang"),
        pytest.param("forkserver", "hang in C", marks=linux_only),
        pytest.param("forkserver", "stop", marks=linux_only),
        pytest.param("spawn", "hang in C", marks=linux_only),
        pytest.param("fork", "hang in C", marks=linux_only),
        pytest.param("spawn", "stop", marks=linux_only),
        pytest.param("fork", "stop", marks=linux_only),
    ],
)
def test_workers_end_when_the_trainer_is_killed(
    start_method: str, fault: str, tmp_path: Path
) -> None:
    process, pids = held(tmp_path, fault, start_method)

    process.kill()
    process.wait()

    wait_until_gone(pids)


def shared_names() -> set[str]:
    """What lies in shared memory by a name; not that of joblib, which another test may be using."""
    return {name for name in os.listdir("/dev/shm") if "loky" not in name and "joblib" not in name}


@linux_only
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_whole_tree_that_is_killed_leaves_nothing_behind(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shared_before = shared_names()
    process, pids = held(tmp_path, "nothing", start_method)

    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    wait_until_gone(pids)
    wait_until(lambda: shared_names() <= shared_before)  # others have some there for a moment
    assert list(temporary.iterdir()) == []


def test_a_start_in_a_daemonic_process_says_what_to_do() -> None:
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

    assert "daemonic" in queue.get()
    queue.close()


def test_workers_start_under_joblibs_loky() -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is what brings the loky start method")

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


def test_where_no_process_can_be_started_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)

    with pytest.raises(WorkerStartError, match=r"worker 1 of 2 cannot be started: .*SerialEnv"):
        ParallelEnv([CountingEnv] * 2, n_workers=2)


@STARTS
@pytest.mark.parametrize("fault", ["kill", "hang", "stop"])
def test_a_lost_worker_is_restarted_and_the_other_envs_are_untouched(
    start_method: Any, n_workers: int, fault: str
) -> None:
    env = four_envs(
        fault,
        start_method=start_method,
        n_workers=n_workers,
        on_worker_death="restart",
        step_timeout=60.0 if fault == "kill" else 2.0,
    )
    rows = list(range(4 - 4 // n_workers, 4))  # those of the worker of env 3
    env.reset()
    env.step(zeros(env))

    with answers_within(50), pytest.warns(RuntimeWarning, match="restart 1 of 10"):
        obs, reward, terminated, truncated, infos = env.step(zeros(env))

    lost = np.isin(np.arange(4), rows)
    assert truncated.tolist() == lost.tolist()
    assert not terminated.any()
    assert infos["worker_restarted"].tolist() == lost.tolist()
    assert obs[:, 0].tolist() == [0.0 if is_lost else 2.0 for is_lost in lost]
    assert reward.tolist() == [0.0 if is_lost else 20.0 for is_lost in lost]
    assert [infos["final_obs"][row].tolist() for row in rows] == [[1.0, 1.0]] * len(rows)
    obs, _, _, truncated, infos = env.step(zeros(env))
    assert obs[:, 0].tolist() == [1.0 if is_lost else 3.0 for is_lost in lost]
    assert not truncated.any()
    assert "worker_restarted" not in infos
    env.close()


def test_a_crash_loop_ends_when_the_restarts_are_used_up() -> None:
    class MortalEnv(CountingEnv):
        def step(self, action: Any) -> Any:
            os._exit(9)

    env = ParallelEnv(
        [MortalEnv], start_method="fork", on_worker_death="restart", max_restarts=2, seed=1
    )
    env.reset()
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="exit code 9; restart"):
            env.step(zeros(env))

    with pytest.raises(WorkerError, match=r"exit code 9; all 2 restarts"):
        env.step(zeros(env))
    env.close()


def test_a_worker_that_dies_while_it_is_restarted_counts_again() -> None:
    env_fns = [partial(FaultyEnv, "kill", 7)]
    env = ParallelEnv(
        env_fns, start_method="fork", on_worker_death="restart", max_restarts=3, seed=7
    )
    env.reset()
    env.step(zeros(env))
    env.env_fns[0] = partial(faulty_factory, "exit", True)

    with (
        pytest.warns(RuntimeWarning, match="restart 3 of 3"),
        pytest.raises(WorkerError, match="all 3 restarts"),
    ):
        env.step(zeros(env))
    env.close()


def test_a_worker_that_dies_in_a_reset_is_restarted_and_reset() -> None:
    env = ParallelEnv([NoisyEnv] * 2, start_method="fork", n_workers=2, on_worker_death="restart")
    expected, _ = env.reset(seed=3)
    os.kill(env.worker_pids[1], signal.SIGKILL)

    with pytest.warns(RuntimeWarning, match="env 1 was killed by SIGKILL; restart"):
        obs, infos = env.reset(seed=3)

    assert obs["vector"].tolist() == expected["vector"].tolist()
    assert infos["worker_restarted"].tolist() == [False, True]
    env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_in_other_modes_a_restarted_env_shows_its_last_observation(mode: AutoresetMode) -> None:
    env = four_envs(
        "kill", start_method="fork", n_workers=4, on_worker_death="restart", autoreset_mode=mode
    )
    env.reset()
    env.step(zeros(env))
    with pytest.warns(RuntimeWarning, match="restart"):
        obs, _, _, truncated, infos = env.step(zeros(env))
    assert obs[:, 0].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert truncated.tolist() == [False, False, False, True]
    assert "final_obs" not in infos

    if mode is AutoresetMode.DISABLED:
        obs, _ = env.reset(options={"reset_mask": truncated})
    else:
        obs = env.step(zeros(env))[0]
    assert obs[3, 0] == 0.0
    env.close()


def test_a_death_in_a_call_is_told_and_the_next_step_restarts() -> None:
    env = four_envs("kill", "call", start_method="fork", n_workers=4, on_worker_death="restart")
    env.reset()
    with pytest.raises(WorkerError, match="SIGKILL"):
        env.call("poke")

    with pytest.warns(RuntimeWarning, match="restart 1"):
        truncated = env.step(zeros(env))[3]
    assert truncated.tolist() == [False, False, False, True]
    env.close()


def test_a_worker_that_dies_in_the_first_step_after_a_restore_shows_what_was_seen() -> None:
    env = ParallelEnv([partial(CountingEnv, 50)], start_method="fork", on_worker_death="restart")
    env.reset()
    env.step(zeros(env))
    snapshots = env.snapshot()
    env.close()
    env = ParallelEnv([partial(CountingEnv, 50)], start_method="fork", on_worker_death="restart")
    env.restore(snapshots)
    os.kill(env.worker_pids[0], signal.SIGKILL)

    with pytest.warns(RuntimeWarning, match="restart 1"):
        infos = env.step(zeros(env))[4]

    assert infos["final_obs"][0].tolist() == [1.0, 1.0]
    env.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@STARTS
def test_a_stop_signal_is_left_to_the_parent_and_not_inherited(
    start_method: Any, n_workers: int, number: int
) -> None:
    env = ParallelEnv([WhoIgnores] * 4, start_method=start_method, n_workers=n_workers)
    env.reset()

    for pid in env.worker_pids:
        os.kill(pid, number)
    env.step(zeros(env))

    assert env.call("ignored_by_a_child") == ([],) * 4
    env.close()


class WhoIgnores(CountingEnv):
    def ignored_by_a_child(self) -> list[str]:
        """The stop signals that a program would ignore which this env starts."""
        program = (
            "import signal as s; "
            "print([n for n in ('SIGTERM', 'SIGHUP') if s.getsignal(s.Signals[n]) is s.SIG_IGN])"
        )
        command = [sys.executable, "-S", "-c", program]
        return literal_eval(subprocess.run(command, capture_output=True, text=True).stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", [5, None])
def test_envs_that_draw_from_global_generators_differ_between_workers(seed: int | None) -> None:
    def drawn() -> list[float]:
        env = ParallelEnv([GloballyRandom] * 2, start_method="fork", n_workers=2, seed=seed)
        numbers = [float(each) for each in env.reset()[0].ravel()]
        env.close()
        return numbers

    first, second = drawn(), drawn()

    assert len(set(first)) == 4
    assert (first == second) == (seed is not None)


class GloballyRandom(CountingEnv):
    def _observe(self) -> Any:
        return np.array([random.random(), np.random.random()], dtype=np.float32)


def test_a_restarted_env_does_not_replay_its_seed_and_repeats_with_the_run() -> None:
    def after_restart() -> list[float]:
        env = ParallelEnv([NoisyEnv], start_method="fork", seed=5, on_worker_death="restart")
        first, _ = env.reset()
        os.kill(env.worker_pids[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="restart"):
            obs = env.step(np.zeros((1, 2), dtype=np.float32))[0]
        env.close()
        assert obs["vector"].tolist() != first["vector"].tolist()
        return list(obs["vector"].ravel())

    assert after_restart() == after_restart()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wrong shape", r"shape \(1,\)[\s\S]*\(2,\)"),
        ("no reward", "reward None"),
        ("no flag", "terminated=None"),
    ],
)
def test_a_step_that_lies_is_an_error(fault: str, words: str) -> None:
    for env in (
        SerialEnv([partial(FaultyEnv, fault, 7)], seed=7),
        ParallelEnv([partial(FaultyEnv, fault, 7)], seed=7, start_method="fork"),
    ):
        env.reset()
        env.step(zeros(env))
        with pytest.raises(WorkerError, match=rf"env 0 \(seed 7\) raised:[\s\S]*{words}"):
            env.step(zeros(env))
        env.close()


@pytest.mark.parametrize(
    ("fault", "words"), [("nan", "observation"), ("infinite reward", "reward that is not finite")]
)
def test_what_is_not_finite_is_found_on_request(fault: str, words: str) -> None:
    for check in (True, False):
        env = ParallelEnv(
            [partial(FaultyEnv, fault, 7)], seed=7, start_method="fork", check_finite=check
        )
        env.reset()
        env.step(zeros(env))
        with pytest.raises(WorkerError, match=words) if check else contextlib.nullcontext():
            env.step(zeros(env))
        env.close()
    env_with_boxes = SerialEnv([NoisyEnv], seed=1, check_finite=True)
    env_with_boxes.reset()
    with pytest.raises(ValueError, match="actions are not finite"):
        env_with_boxes.step(np.array([[np.nan, 0.0]], dtype=np.float32))


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_printing_envs_corrupt_nothing(
    start_method: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    env = ParallelEnv([PrintingEnv] * 4, n_workers=2, start_method=start_method, seed=1)
    env.reset()
    assert [env.step(zeros(env))[0][0, 0] for _ in range(5)] == [1.0, 2.0, 0.0, 1.0, 2.0]
    env.close()

    assert capfd.readouterr().out.count("raw out") == 20


def test_64_envs_in_many_workers() -> None:
    env = ParallelEnv([CountingEnv] * 64, n_workers=16, start_method="fork", seed=1)
    env.reset()

    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0] * 64
    env.close()


def test_a_forked_copy_of_the_parent_leaves_the_workers_alone() -> None:
    env = ParallelEnv([CountingEnv] * 2, n_workers=2, start_method="fork", seed=1)
    env.reset()
    pid = os.fork()
    if pid == 0:
        del env
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)

    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]
    env.close()


def test_workers_started_by_a_thread_outlive_it() -> None:
    made: list[ParallelEnv] = []
    thread = threading.Thread(
        target=lambda: made.append(
            ParallelEnv([CountingEnv] * 2, n_workers=2, start_method="fork", seed=1)
        )
    )
    thread.start()
    thread.join()

    made[0].reset()
    assert made[0].step(zeros(made[0]))[0][:, 0].tolist() == [1.0, 1.0]
    made.pop().close()


def test_every_type_that_an_env_raises_can_be_caught_and_pickled() -> None:
    for kind, arguments in [
        (FileNotFoundError, (2, "no such ROM")),
        (ConnectionError, ("simulator gone",)),
        (TimeoutError, ("too late",)),
        (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "bad")),
        (AssertionError, ("no",)),
        (StopIteration, ("end",)),
        (CodedError, (7,)),
    ]:
        env = ParallelEnv([partial(RaisingEnv, kind, arguments)], start_method="fork", seed=1)
        env.reset()
        with pytest.raises(kind, match=r"env 0 \(seed 1\) raised") as caught:
            env.step(zeros(env))

        assert isinstance(caught.value, WorkerError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, WorkerError)
        assert str(again) == str(caught.value)
        if kind is CodedError:
            assert caught.value.code == 7
        env.close()


def test_what_cannot_be_unpickled_is_told_by_its_env() -> None:
    env = ParallelEnv([UnpicklableEnv] * 2, start_method="fork", n_workers=2, seed=1)
    env.reset()

    with pytest.raises(WorkerError, match=r"what env 0 gave cannot be unpickled here: .*one way"):
        env.call("gift")
    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]
    env.close()


def test_asking_again_and_again_does_not_put_off_the_deadline() -> None:
    env = four_envs("hang", start_method="fork", n_workers=2, step_timeout=3.0)
    env.reset()
    env.step(zeros(env))
    env.step_async(zeros(env))

    with answers_within(30), pytest.raises(WorkerTimeoutError, match=r"within 3.0 s and was ended"):
        ask_until_told(env)
    env.close()


def ask_until_told(env: ParallelEnv) -> None:
    while True:
        with contextlib.suppress(AnswerPendingError):
            env.step_wait(timeout=0.2)


def test_patience_loses_nothing_although_a_worker_is_dead(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    env_fns = [partial(GatedEnv, gate), partial(FaultyEnv, "kill", 8)]
    env = ParallelEnv(env_fns, seed=7, n_workers=2, start_method="fork", on_worker_death="restart")
    env.reset()
    env.step(zeros(env))
    gate.unlink()
    env.step_async(zeros(env))
    wait_until_gone([env.worker_pids[1]])
    with pytest.raises(TimeoutError, match="no answer of env 0"):
        env.step_wait(timeout=0.2)

    gate.touch()
    with pytest.warns(RuntimeWarning, match="restart 1"):
        obs, _, _, truncated, _ = env.step_wait()
    assert obs[:, 0].tolist() == [2.0, 0.0]
    assert truncated.tolist() == [False, True]
    env.close()


def test_a_restart_that_fails_once_is_tried_again_by_the_next_step() -> None:
    env = ParallelEnv(
        [CountingEnv] * 2, start_method="fork", n_workers=2, seed=1, on_worker_death="restart"
    )
    env.reset()
    os.kill(env.worker_pids[1], signal.SIGKILL)
    env.env_fns[1] = make_broken
    with pytest.warns(RuntimeWarning), pytest.raises(OSError, match="not installed"):
        env.step(zeros(env))

    env.env_fns[1] = CountingEnv
    with pytest.warns(RuntimeWarning, match="restart 2"):
        obs, _, _, truncated, infos = env.step(zeros(env))
    assert truncated.tolist() == [False, True]
    assert infos["worker_restarted"].tolist() == [False, True]
    assert obs[:, 0].tolist() == [2.0, 0.0]
    env.close()


def test_a_death_before_the_first_reset_is_restarted_by_it() -> None:
    env = ParallelEnv([NoisyEnv], start_method="fork", seed=3, on_worker_death="restart")
    os.kill(env.worker_pids[0], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="restart 1"):
        obs, _ = env.reset()

    assert obs["vector"].tolist() == SerialEnv([NoisyEnv], seed=3).reset()[0]["vector"].tolist()
    env.close()


def test_an_unseeded_reset_that_restarts_a_worker_repeats_with_the_run() -> None:
    def after_restart() -> list[float]:
        env = ParallelEnv([NoisyEnv], start_method="fork", seed=5, on_worker_death="restart")
        env.reset()
        os.kill(env.worker_pids[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="restart"):
            obs, _ = env.reset()
        env.close()
        return list(obs["vector"].ravel())

    assert after_restart() == after_restart()


def test_an_interrupt_is_not_blamed_on_an_env() -> None:
    for env in (
        SerialEnv([partial(SlowEnv, 1.0)], seed=1),
        ParallelEnv([partial(SlowEnv, 1.0)] * 2, seed=1, start_method="fork", main_slice=True),
    ):
        env.reset()
        with pytest.raises(InterruptedByAlarm):
            step_with_an_alarm(env)
        with pytest.raises(WorkerError, match="was interrupted"):
            env.step(zeros(env))
        env.reset()
        env.close()


def step_with_an_alarm(env: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    env.step(zeros(env))


def test_close_never_raises_whatever_the_envs_do(recwarn: pytest.WarningsRecorder) -> None:
    for fault in ("raise", "sys.exit"):
        for options in ({}, {"main_slice": True}):
            env = four_envs(fault, "close", start_method="fork", n_workers=2, **options)
            env.reset()
            env.close()
        serial = SerialEnv([partial(FaultyEnv, fault, 7, "close")] * 2, seed=7)
        serial.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            serial.close()
        assert serial.closed


def test_a_stuck_worker_does_not_keep_others_from_closing_their_envs(tmp_path: Path) -> None:
    env_fns = [partial(FaultyEnv, "hang", 7, "step"), partial(BulkyEnv, tmp_path / "closed")]
    env = ParallelEnv(env_fns, seed=7, n_workers=2, start_method="fork")
    env.reset()
    env.step(zeros(env))
    env.step_async(zeros(env))
    with pytest.raises(AnswerPendingError):
        env.step_wait(timeout=0.5)

    env.close(timeout=3)

    assert (tmp_path / "closed").exists()


def test_close_in_a_forked_copy_leaves_the_workers_alone() -> None:
    env = ParallelEnv([CountingEnv] * 2, n_workers=2, start_method="fork", seed=1)
    env.reset()
    pid = os.fork()
    if pid == 0:
        try:
            env.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]
    env.close()


@pytest.mark.parametrize(
    "kind", [SerialEnv, partial(ParallelEnv, start_method="fork", n_workers=1)]
)
def test_envs_that_were_made_before_one_failed_are_closed(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not installed"):
        kind([partial(BulkyEnv, tmp_path / "closed"), make_broken])

    if kind is SerialEnv:
        assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("side", [64, 133, 134, 180])
def test_spaces_of_any_size_reach_the_workers(side: int) -> None:
    space = spaces.Box(0, 255, (side, side, 3), np.uint8)
    env_fns = [partial(SpaceEnv, space, spaces.Discrete(2))] * 4
    env = ParallelEnv(env_fns, n_workers=4, start_method="fork", seed=1)

    assert env.reset()[0].shape == (4, side, side, 3)
    env.close()


def test_interrupts_at_any_instant_leave_an_env_that_resets_or_says_why() -> None:
    env = ParallelEnv([BigInfoEnv] * 4, n_workers=2, start_method="fork", seed=1)
    env.reset()
    random = np.random.default_rng(0)
    for _ in range(100):
        with contextlib.suppress(InterruptedByAlarm):
            # Within the block: on a busy machine it may be over before the next line.
            signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-4, 4e-3)))
            while True:
                env.step(zeros(env))
        try:
            env.reset()
            assert env.step(zeros(env))[0][:, 0].tolist() == [1.0] * 4
        except WorkerError:
            env.close()  # a worker was lost in the middle of a message
            env = ParallelEnv([BigInfoEnv] * 4, n_workers=2, start_method="fork", seed=1)
            env.reset()
    env.close()


class InterruptedByAlarm(BaseException):
    pass


@pytest.fixture(autouse=True)
def alarm_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedByAlarm

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def printed_by(program: str, *arguments: str, timeout: float = 110) -> str:
    """In a process of its own: garbage and threads of other tests hold memory and files here."""
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

gc.disable()  # what is given back is given back by close
errors = []  # their tracebacks hold every env for ever, and its memory by one descriptor

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

print([cycle(sys.argv[2] == "loses a worker") for _ in range(int(sys.argv[1]))])
"""


@linux_only
@pytest.mark.parametrize(
    ("n_envs", "way"),
    [
        (20, "whole"),
        (20, "loses a worker"),
        pytest.param(1000, "whole", marks=pytest.mark.slow),
    ],
)
def test_envs_one_after_the_other_leave_no_descriptor_and_no_child(n_envs: int, way: str) -> None:
    counts = literal_eval(printed_by(COUNT_DESCRIPTORS, str(n_envs), way))

    each = 1 if way == "loses a worker" else 0
    # The first one may open what stays open.
    assert counts[1:] == [counts[1] + each * i for i in range(n_envs - 1)]


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
def test_ten_million_steps_grow_no_memory() -> None:
    grown = literal_eval(printed_by(GROW, timeout=580))

    assert len(grown) == 3
    assert max(grown) < 1.0
