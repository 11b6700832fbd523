"""on_worker_death="restart": a lost worker is replaced, and the other envs are not affected."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make, wait_until_gone
from faulty_envs import GatedEnv, faulty_factory
from gymnasium.vector import AutoresetMode
from tiny_envs import CountingEnv, FaultyEnv, NoisyEnv
from vec_envs import answers_within, each_start, forked, four_envs, zeros

from ml_pipeline.envs.vec_env import SerialEnv, WorkerError

pytestmark = pytest.mark.usefixtures("leaves_no_child")


@pytest.fixture
def way() -> Make:
    return partial(forked, on_worker_death="restart")


def kill_worker(env: Any, number: int = 0) -> None:
    pid = env.worker_pids[number]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])


def step_and_restart(env: Any, number: int = 1) -> Any:
    """Step the envs, which warns about the given restart."""
    with pytest.warns(RuntimeWarning, match=f"restart {number} of 10"):
        return env.step(zeros(env))


@each_start
@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(each, marks=pytest.mark.slow) for each in ("stop", "hang"))]
)
def test_only_the_envs_of_a_lost_worker_are_truncated_and_reset(start: Make, fault: str) -> None:
    seconds = 60.0 if fault == "kill" else 1.5
    env = start(four_envs(fault), seed=7, on_worker_death="restart", step_timeout=seconds)
    rows = list(range(4 - 4 // env.n_workers, 4))  # those of the worker of env 3
    env.step(zeros(env))

    with answers_within(50):
        obs, reward, terminated, truncated, infos = step_and_restart(env)

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


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_without_same_step_autoreset_a_restarted_env_shows_its_last_observation(
    start: Make, mode: AutoresetMode
) -> None:
    env = start(four_envs("kill"), seed=7, n_workers=4, autoreset_mode=mode)
    env.step(zeros(env))
    obs, _, _, truncated, infos = step_and_restart(env)
    assert obs[:, 0].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert truncated.tolist() == [False, False, False, True]
    assert "final_obs" not in infos

    if mode is AutoresetMode.DISABLED:
        obs, _ = env.reset(options={"reset_mask": truncated})
    else:
        obs = env.step(zeros(env))[0]
    assert obs[3, 0] == 0.0


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_restart_sets_the_attributes_before_the_reset(start: Make, start_method: Any) -> None:
    class LevelEnv(CountingEnv):
        level: Any = (0.0,)

        def _observe(self) -> Any:
            return np.full(2, self.level[0], dtype=np.float32)

    env = start([LevelEnv] * 4, start_method=start_method)
    levels = [[1.0], [2.0], [3.0], [4.0]]
    env.set_attr("level", np.array([9.0]))
    env.set_attr("level", levels)
    levels[3][0] = 5.0  # a later change of the caller's object has no effect
    kill_worker(env, 1)

    obs, _, _, truncated, _ = step_and_restart(env)

    assert truncated.tolist() == [False, False, True, True]
    assert obs[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_set_attr_reaches_a_dead_worker_when_the_next_step_restarts_it(start: Make) -> None:
    env = start([CountingEnv] * 2)
    kill_worker(env, 1)

    env.set_attr("length", [20, 21])

    assert step_and_restart(env)[3].tolist() == [False, True]
    assert env.get_attr("length") == (20, 21)


def test_attributes_of_envs_that_a_resize_closed_are_forgotten(start: Make) -> None:
    env = start([CountingEnv] * 3)
    env.set_attr("length", [20, 21, 22])
    env.resize(2)
    env.resize(3)
    kill_worker(env)  # that of envs 0 and 2

    step_and_restart(env)

    assert env.get_attr("length") == (20, 21, 20)  # that of env 0, whose factory env 2 uses


def test_an_attribute_that_an_env_refuses_is_not_set_again(start: Make) -> None:
    class StrictEnv(CountingEnv):
        @property
        def level(self) -> int:
            return 1

    env = start([StrictEnv] * 2, seed=1)
    with pytest.raises(AttributeError, match=r"env [01] \(seed [12]\)"):
        env.set_attr("level", 2)
    kill_worker(env)

    step_and_restart(env)


def test_the_death_is_an_error_after_max_restarts(start: Make) -> None:
    class MortalEnv(CountingEnv):
        def step(self, action: Any) -> Any:
            os._exit(9)

    env = start([MortalEnv], max_restarts=2)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="exit code 9 while it ran env 0; restart"):
            env.step(zeros(env))

    with pytest.raises(WorkerError, match=r"exit code 9 while it ran env 0; all 2 restarts"):
        env.step(zeros(env))


def test_a_worker_that_dies_while_it_is_restarted_counts_again(start: Make) -> None:
    env = start([partial(FaultyEnv, "kill", 7)], max_restarts=3, seed=7)
    env.step(zeros(env))
    env.env_fns[0] = partial(faulty_factory, "exit")

    with (
        pytest.warns(RuntimeWarning, match="restart 3 of 3"),
        pytest.raises(WorkerError, match="all 3 restarts"),
    ):
        env.step(zeros(env))


def test_the_next_step_repeats_a_restart_that_failed(start: Make) -> None:
    env = start([CountingEnv] * 2)
    kill_worker(env, 1)
    env.env_fns[1] = partial(faulty_factory, "raise")
    with pytest.raises(LookupError, match="puck left"):
        step_and_restart(env)

    env.env_fns[1] = CountingEnv
    obs, _, _, truncated, infos = step_and_restart(env, 2)

    assert truncated.tolist() == [False, True]
    assert infos["worker_restarted"].tolist() == [False, True]
    assert obs[:, 0].tolist() == [2.0, 0.0]


def test_a_death_in_a_call_is_an_error_and_the_next_step_restarts(start: Make) -> None:
    env = start(four_envs("kill", "call"), seed=7, n_workers=4)
    with pytest.raises(WorkerError, match="SIGKILL"):
        env.call("poke")

    assert step_and_restart(env)[3].tolist() == [False, False, False, True]


def test_a_timeout_loses_no_result_even_if_a_worker_is_dead(start: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    env = start([partial(GatedEnv, gate), partial(FaultyEnv, "kill", 8)], seed=7)
    env.step(zeros(env))
    gate.unlink()
    env.step_async(zeros(env))
    wait_until_gone([env.worker_pids[1]])
    with pytest.raises(TimeoutError, match="no answer from env 0"):
        env.step_wait(timeout=0.2)

    gate.touch()
    with pytest.warns(RuntimeWarning, match="restart 1"):
        obs, _, _, truncated, _ = env.step_wait()
    assert obs[:, 0].tolist() == [2.0, 0.0]
    assert truncated.tolist() == [False, True]


def test_the_final_observation_of_a_restored_and_lost_env_is_the_restored_one(make: Make) -> None:
    first, second = (make([partial(CountingEnv, 50)]) for _ in range(2))
    first.reset()
    first.step(zeros(first))
    second.restore(first.snapshot())
    kill_worker(second)

    infos = step_and_restart(second)[4]

    assert infos["final_obs"][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("was_reset", [True, False])
def test_a_reset_restarts_a_dead_worker_and_uses_its_seed(make: Make, was_reset: bool) -> None:
    expected = SerialEnv([NoisyEnv] * 2, seed=3).reset()[0]["vector"].tolist()
    env = make([NoisyEnv] * 2, seed=3)
    if was_reset:
        env.reset()
    kill_worker(env, 1)

    with pytest.warns(RuntimeWarning, match="env 1 was killed by SIGKILL; restart"):
        obs, infos = env.reset(seed=3 if was_reset else None)

    assert obs["vector"].tolist() == expected
    assert infos["worker_restarted"].tolist() == [False, True]


@pytest.mark.parametrize(
    "request_to",
    [lambda env: env.step(np.zeros((1, 2), dtype=np.float32)), lambda env: env.reset()],
    ids=["step", "reset"],
)
def test_the_new_seed_of_a_restart_is_the_same_in_every_run(make: Make, request_to: Any) -> None:
    def after_restart() -> list[float]:
        env = make([NoisyEnv], seed=5)
        first, _ = env.reset()
        kill_worker(env)
        with pytest.warns(RuntimeWarning, match="restart"):
            obs, *_ = request_to(env)
        assert obs["vector"].tolist() != first["vector"].tolist()
        return list(obs["vector"].ravel())

    assert after_restart() == after_restart()
