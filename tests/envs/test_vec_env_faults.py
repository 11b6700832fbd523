"""ParallelEnv when envs raise, die, hang or are interrupted; real processes, real signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TESTS, Capture, Make
from faulty_envs import (
    BulkyEnv,
    CodedError,
    Colour,
    GatedEnv,
    InterruptingEnv,
    PrintingEnv,
    faulty_factory,
)
from tiny_envs import CountingEnv, FaultyEnv, OddError, SlowEnv
from vec_envs import (
    WAYS,
    answers_within,
    each_start,
    each_start_mostly_slow,
    each_way,
    forked,
    four_envs,
    linux_only,
    zeros,
)

from ml_pipeline.envs.vec_env import (
    AnswerPendingError,
    ParallelEnv,
    SerialEnv,
    WorkerError,
    WorkerTimeoutError,
)

pytestmark = pytest.mark.usefixtures("leaves_no_child")


def make_and_play(make: Make, fault: str, where: str, **options: Any) -> None:
    """Make four envs; reset, step and call them."""
    if where == "factory":
        make([*[CountingEnv] * 3, partial(faulty_factory, fault)], seed=7, **options)
        return
    play(make(four_envs(fault, where), seed=7, **options))


def play(env: Any) -> None:
    env.reset()
    env.step(zeros(env))
    env.step(zeros(env))
    env.call("poke")


@each_start
def test_an_exception_names_the_env_and_can_be_caught_as_its_own_type(start: Make) -> None:
    env = start(four_envs("raise"), seed=7)
    env.step(zeros(env))

    with answers_within(30), pytest.raises(LookupError, match="puck left") as caught:
        env.step(zeros(env))

    assert isinstance(caught.value, WorkerError)
    assert "env 3 (seed 10) raised:" in str(caught.value)
    assert "in misbehave" in str(caught.value), "the message contains the worker's traceback"
    assert type(caught.value.__cause__) is LookupError
    assert env.step(zeros(env))[0][:, 0].tolist() == [3.0] * 4, "no reply is lost or mixed up"


@each_start_mostly_slow
@pytest.mark.parametrize("where", ["factory", "reset", "call"])
def test_an_exception_outside_a_step_names_the_env(make: Make, where: str) -> None:
    with pytest.raises(LookupError, match=r"env 3 \(seed 10\) raised:[\s\S]*puck left"):
        make_and_play(make, "raise", where)


def test_an_exception_is_raised_at_once_even_if_other_workers_are_busy(start: Make) -> None:
    env = start([partial(SlowEnv, 60.0), partial(FaultyEnv, "raise", 8)], seed=7)
    env.set_attr("seconds", [0.0, 0.0])
    env.step(zeros(env))
    env.set_attr("seconds", [60.0, 0.0])

    with answers_within(30), pytest.raises(LookupError):
        env.step(zeros(env))
    env.close(terminate=True)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (FileNotFoundError, (2, "no such ROM")),
        (ConnectionError, ("simulator gone",)),
        (TimeoutError, ("too late",)),
        (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "bad")),
        (AssertionError, ("no",)),
        (StopIteration, ("end",)),
        (CodedError, (7,)),
    ],
)
def test_any_exception_can_be_caught_and_pickled(start: Make, kind: Any, arguments: Any) -> None:
    class RaisingEnv(CountingEnv):
        def step(self, action: Any) -> Any:
            raise kind(*arguments)

    env = start([RaisingEnv], seed=1)
    with pytest.raises(kind, match=r"env 0 \(seed 1\) raised") as caught:
        env.step(zeros(env))

    assert isinstance(caught.value, WorkerError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, WorkerError)
    assert str(again) == str(caught.value)
    if kind is CodedError:
        assert caught.value.code == 7


def test_a_result_that_cannot_be_unpickled_names_its_env(start: Make) -> None:
    class GivingEnv(CountingEnv):
        def gift(self) -> OddError:
            return OddError("one", "way")

    env = start([GivingEnv] * 2)

    with pytest.raises(WorkerError, match=r"a result of env 0 cannot be unpickled here: .*second"):
        env.call("gift")
    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]


class LockedEnv(CountingEnv):
    """The env with the seed 10 gives a lock, which cannot be pickled."""

    def __init__(self, where: str) -> None:
        super().__init__(length=2)
        self.where = where

    def _given(self, where: str) -> Any:
        return threading.Lock() if self.np_random_seed == 10 and where == self.where else "open"

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, {"fine": 1, "lock": self._given("reset")}

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"fine": 1, "lock": self._given("final" if rest[2] or rest[3] else "step")}

    def poke(self) -> Any:
        return self._given("call")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("reset", r"info\['lock'\]"),
        ("step", r"info\['lock'\]"),
        ("final", r"info\['lock'\]"),
        ("call", "its result"),
    ],
)
def test_a_value_that_cannot_be_pickled_names_its_env(make: Make, where: str, what: str) -> None:
    env = make([partial(LockedEnv, where)] * 4, seed=7)
    words = rf"env 3 \(seed 10\): {what} cannot be sent from a worker: TypeError: .*lock"

    with pytest.raises(TypeError, match=words) as caught:
        play(env)

    assert isinstance(caught.value, WorkerError)
    env.set_attr("where", "nowhere")
    env.reset()
    assert env.step(zeros(env))[4]["lock"].tolist() == ["open"] * 4


@pytest.mark.parametrize("where", ["reset", "step", "final", "call"])
def test_serial_envs_need_not_be_pickled(where: str) -> None:
    env = SerialEnv([partial(LockedEnv, where)] * 4, seed=7)

    assert env.reset()[1]["fine"].tolist() == [1] * 4
    play(env)


class ColourEnv(CountingEnv):
    """Observes an object that cannot be pickled once ``is_bad`` is set."""

    is_bad = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Colour()

    def _observe(self) -> Any:
        return threading.Lock() if self.is_bad else "#fff"


def test_an_observation_that_cannot_be_pickled_names_its_env(start: Make) -> None:
    env = start([ColourEnv] * 4, seed=7)
    env.set_attr("is_bad", [False, False, False, True])

    with pytest.raises(TypeError, match=r"env 3 \(seed 10\)[\s\S]*cannot pickle .*lock"):
        env.step(zeros(env))


@each_way
def test_envs_built_before_one_failed_are_closed(make: Make, way: Any, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="puck left"):
        make([partial(BulkyEnv, tmp_path / "closed"), partial(faulty_factory, "raise")])

    if way is not forked:  # workers are killed
        assert (tmp_path / "closed").exists()


@each_start_mostly_slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segfault", "was killed by SIGSEGV"),
        ("exit", "ended with exit code 7"),
        # These two are exceptions, which the worker survives.
        ("sys.exit", r"env 3 \(seed 10\) raised:[\s\S]*SystemExit: 3"),
        ("interrupt", r"env 3 \(seed 10\) raised:[\s\S]*KeyboardInterrupt"),
    ],
)
def test_a_death_is_reported_with_envs_and_cause(start: Make, fault: str, words: str) -> None:
    env = start(four_envs(fault), seed=7)
    env.step(zeros(env))

    with answers_within(30), pytest.raises(WorkerError, match=words) as caught:
        env.step(zeros(env))

    if fault in ("kill", "segfault", "exit"):
        assert {1: "envs 0-3", 2: "envs 2-3", 4: "env 3"}[env.n_workers] in str(caught.value)
        assert str(caught.value).endswith("while it ran env 3")
        with answers_within(30), pytest.raises(WorkerError, match=words):
            env.step(zeros(env))


@linux_only
def test_a_death_is_noticed_even_if_a_child_of_the_env_keeps_the_connection_open(
    start: Make, tmp_path: Path
) -> None:
    class ForkingEnv(CountingEnv):
        def step(self, action: Any) -> Any:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os._exit(5)

    env = start([ForkingEnv])
    with answers_within(30), pytest.raises(WorkerError, match="exit code 5"):
        env.step(zeros(env))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@each_start_mostly_slow
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("hang", "factory"),
        pytest.param("hang", "reset", marks=pytest.mark.slow),
        ("hang", "step"),
        pytest.param("hang in C", "step", marks=pytest.mark.slow),
        ("stop", "step"),
        pytest.param("hang", "call", marks=pytest.mark.slow),
    ],
)
def test_a_stuck_worker_is_an_error_after_the_deadline(make: Make, fault: str, where: str) -> None:
    words = "within 0.5 s and was killed" + (
        " while it ran env 3; " if where != "factory" else "; "
    )
    with answers_within(8), pytest.raises(WorkerTimeoutError, match=words):
        make_and_play(make, fault, where, step_timeout=0.5)


def test_a_worker_that_dies_between_steps_names_no_running_env(start: Make) -> None:
    env = start([CountingEnv] * 4)
    env.step(zeros(env))
    os.kill(env.worker_pids[1], signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"^the worker of envs 2-3 was killed by SIGKILL$"):
        env.step(zeros(env))


START_WITH_A_LARGE_FACTORY = """
import sys, time
sys.path.insert(0, {!r})
if __name__ != "__main__":
    {}
from ml_pipeline.envs.workers import pool
from ml_pipeline.envs.vec_env import ParallelEnv
from tiny_envs import CountingEnv
pool._START_SECONDS = {}
class Heavy(CountingEnv):
    ballast = bytes(8_000_000)
ParallelEnv([Heavy], step_timeout=0.5)
"""


@pytest.mark.parametrize(
    ("in_worker", "start_seconds", "words"),
    [
        ("time.sleep(1000)", 1.0, "TimeoutError: the worker of env 0 has not answered within 1.0"),
        # Without a __main__ guard a spawned worker starts workers itself, which fails.
        ("pass", 60.0, "WorkerError: the worker of env 0 ended with exit code 1"),
    ],
)
def test_a_worker_that_never_takes_its_factory_is_an_error(
    tmp_path: Path, in_worker: str, start_seconds: float, words: str
) -> None:
    script = tmp_path / "main_script.py"
    script.write_text(START_WITH_A_LARGE_FACTORY.format(str(TESTS), in_worker, start_seconds))

    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30)

    assert result.returncode == 1
    assert words in result.stderr


def test_a_wait_that_timed_out_can_be_repeated(start: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = start([partial(GatedEnv, gate)] * 2, seed=1)
    env.step_async(zeros(env))
    for error in (TimeoutError, multiprocessing.TimeoutError, WorkerError):
        with pytest.raises(error, match=r"no answer from envs 0-1 within 0.01 s"):
            env.step_wait(timeout=0.01)

    gate.touch()
    assert env.step_wait()[0][:, 0].tolist() == [1.0, 1.0]
    env.reset_async(seed=1)
    assert env.reset_wait(timeout=30)[0][:, 0].tolist() == [0.0, 0.0]
    env.call_async("get_wrapper_attr", "length")
    assert env.call_wait(timeout=30) == (3, 3)


def test_repeated_waits_do_not_extend_the_deadline(start: Make) -> None:
    env = start(four_envs("hang"), seed=7, step_timeout=1.0)
    env.step(zeros(env))
    env.step_async(zeros(env))

    with answers_within(30), pytest.raises(WorkerTimeoutError, match=r"within 1.0 s and was"):
        wait_again_and_again(env)


def wait_again_and_again(env: ParallelEnv) -> None:
    while True:
        with contextlib.suppress(AnswerPendingError):
            env.step_wait(timeout=0.2)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_printed_output_of_envs_does_not_corrupt_results(
    start: Make, start_method: Any, capfd: Capture
) -> None:
    env = start([PrintingEnv] * 4, start_method=start_method)
    assert [env.step(zeros(env))[0][0, 0] for _ in range(5)] == [1.0, 2.0, 0.0, 1.0, 2.0]
    env.close()

    assert capfd.readouterr().out.count("raw out") == 20


class InterruptedByAlarm(BaseException):
    pass


@pytest.fixture
def alarm_interrupts() -> Iterator[None]:
    """SIGALRM raises here, as Ctrl-C would."""

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedByAlarm

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_after_an_interrupted_step_the_env_must_be_reset(start: Make) -> None:
    env = start([InterruptingEnv, CountingEnv])
    with pytest.raises(KeyboardInterrupt):
        env.step(zeros(env))

    assert env.get_attr("length") == (3, 3)
    with pytest.raises(WorkerError, match="was interrupted and its results are lost; reset first"):
        env.step(zeros(env))
    assert env.reset()[0][:, 0].tolist() == [0.0, 0.0]
    assert env.step(zeros(env))[0][:, 0].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("alarm_interrupts")
@pytest.mark.parametrize("way", [SerialEnv, WAYS["shared"]])
def test_an_interrupt_of_the_main_process_is_not_an_error_of_an_env(start: Make) -> None:
    env = start([partial(SlowEnv, 0.5)] * 2, seed=1)
    with pytest.raises(InterruptedByAlarm):
        step_with_an_alarm(env)

    with pytest.raises(WorkerError, match="was interrupted"):
        env.step(zeros(env))
    env.reset()


def step_with_an_alarm(env: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    env.step(zeros(env))


@pytest.mark.usefixtures("alarm_interrupts")
@pytest.mark.slow
def test_after_any_interrupt_the_env_can_be_reset_or_reports_a_lost_worker(start: Make) -> None:
    env = start([partial(BulkyEnv, n_bytes=500_000)] * 4)
    random = np.random.default_rng(0)
    for _ in range(50):
        with contextlib.suppress(InterruptedByAlarm):
            # Inside the block: on a busy machine the alarm may go off before the next line.
            signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-4, 4e-3)))
            while True:
                env.step(zeros(env))
        try:
            env.reset()
            assert env.step(zeros(env))[0][:, 0].tolist() == [1.0] * 4
        except WorkerError:
            env.close()  # the interrupt hit the middle of a message
            env = start(env.env_fns)
