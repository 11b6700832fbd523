"""SerialEnv and ParallelEnv: the contract of a VectorEnv, for every way to run envs."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Capture, Make
from faulty_envs import BulkyEnv, RegularEnv
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tiny_envs import CountingEnv, FaultyEnv, NoisyEnv
from vec_envs import WAYS, each_way, forked, trajectory, zeros

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import (
    HasWorkers,
    ParallelEnv,
    Resizable,
    Restorable,
    SerialEnv,
    WorkerError,
)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_every_vec_env_returns_the_same_as_sync_vector_env(mode: AutoresetMode) -> None:
    expected = trajectory(SyncVectorEnv, [RegularEnv] * 5, mode, 60)

    more = [partial(forked, n_workers=n) for n in (1, 4)]
    for make in (*WAYS.values(), *more, partial(ParallelEnv, n_workers=2)):
        assert trajectory(make, [RegularEnv] * 5, mode, 60) == expected


@each_way
def test_autoreset_disabled_requires_a_reset_by_mask(start: Make) -> None:
    env = start([partial(CountingEnv, 1), CountingEnv], autoreset_mode=AutoresetMode.DISABLED)
    assert env.step(zeros(env))[2].tolist() == [True, False]
    with pytest.raises(WorkerError, match="autoreset_mode=DISABLED: the episode has ended"):
        env.step(zeros(env))

    obs, _ = env.reset(options={"reset_mask": np.array([True, False])})

    assert obs[0, 0] == 0.0
    assert obs[1, 0] > 0.0, "env 1 is not reset"


@pytest.mark.parametrize("way", [*WAYS.values(), partial(forked, n_workers=4)])
def test_env_i_is_seeded_with_seed_plus_i(make: Make) -> None:
    expected = [gym.make("CartPole-v1").reset(seed=7 + i)[0].tolist() for i in range(5)]
    env = make([EnvFactory("CartPole-v1")] * 5, seed=7)

    assert env.reset()[0].tolist() == expected
    assert env.reset()[0].tolist() != expected, "a reset without a seed must not repeat the episode"
    for seed in (7, list(range(7, 12)), np.arange(7, 12), [np.int64(7), 8, 9, 10, 11]):
        assert env.reset(seed=seed)[0].tolist() == expected


@each_way
def test_the_first_reset_of_each_env_uses_the_seed_of_the_constructor(make: Make) -> None:
    expected = SerialEnv([NoisyEnv] * 2, seed=7).reset()[0]["vector"].tolist()
    env = make([NoisyEnv] * 2, seed=np.int64(7))
    with pytest.raises(TypeError, match="reset_mask"):
        env.reset(options={"reset_mask": [True, False]})

    first, _ = env.reset(options={"reset_mask": np.array([True, False])})
    second, _ = env.reset()

    assert first["vector"][0].tolist() == expected[0]
    assert second["vector"][1].tolist() == expected[1]
    assert second["vector"][0].tolist() != expected[0]


@each_way
def test_envs_may_reuse_their_infos_and_change_the_options(make: Make) -> None:
    shared: dict[str, Any] = {}

    class ReusingEnv(CountingEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            obs, _ = super().reset(seed=seed)
            shared["level"] = options.pop("level") if options else -1
            return obs, shared

        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, _ = super().step(action)
            shared["level"] = self._step
            return obs, reward, terminated, truncated, shared

    env = make([ReusingEnv] * 2)
    _, infos = env.reset(seed=1, options={"level": 5})
    assert infos["level"].tolist() == [5, 5]
    for step in (1, 2):
        assert env.step(zeros(env))[4]["level"].tolist() == [step, step]

    infos = env.step(zeros(env))[4]

    assert infos["final_info"]["level"].tolist() == [3, 3]
    assert infos["level"].tolist() == [-1, -1]


@each_way
def test_final_obs_is_correct_although_the_env_reuses_its_buffer(start: Make) -> None:
    env = start([CountingEnv] * 2)
    for _ in range(3):
        obs, reward, terminated, _, infos = env.step(zeros(env))

    assert terminated.all()
    assert obs.tolist() == [[0.0, 0.0]] * 2
    assert reward.tolist() == [30.0, 30.0]
    assert [final.tolist() for final in infos["final_obs"]] == [[3.0, 3.0]] * 2
    assert infos["final_info"]["step"].tolist() == [3, 3]


@each_way
def test_results_are_copies_unless_copy_is_false(start: Make) -> None:
    env, viewing = start([CountingEnv] * 2), start([CountingEnv] * 2, copy=False)

    kept = [env.step(zeros(env)) for _ in range(2)]

    assert [step[0][0, 0] for step in kept] == [1.0, 2.0]
    assert [step[1][0] for step in kept] == [10.0, 20.0]
    assert viewing.step(zeros(viewing))[0] is viewing.step(zeros(viewing))[0]


@each_way
def test_infos_final_sends_only_the_infos_of_ended_episodes(start: Make) -> None:
    env = start([CountingEnv] * 2, infos="final")

    infos = [env.step(zeros(env))[4] for _ in range(3)]

    assert infos[:2] == [{}, {}]
    assert infos[2]["final_info"]["step"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="infos='none': must be 'all' or 'final'"):
        start([CountingEnv], infos="none")


@each_way
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("key error", r"KeyError: 'puck'"),
        ("odd error", "OddError"),  # cannot be unpickled
        ("wrong shape", r"shape \(1,\)[\s\S]*\(2,\)"),
        ("no reward", "reward=None of NoneType, which is not a number"),
        ("no flag", "terminated=None, which is not a bool"),
    ],
)
def test_an_error_names_the_env_and_its_seed(start: Make, fault: str, words: str) -> None:
    env = start([partial(FaultyEnv, fault, 8)] * 2, seed=7)
    env.step(zeros(env))

    with pytest.raises(WorkerError, match=rf"env 1 \(seed 8\) raised:[\s\S]*{words}"):
        env.step(zeros(env))


@each_way
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "an observation that is not finite"),
        ("infinite reward", "reward=inf, which is not finite"),
    ],
)
def test_check_finite_finds_nan_and_infinity(start: Make, fault: str, words: str) -> None:
    env_fns = [partial(FaultyEnv, fault, 8)] * 2
    checked, unchecked = (start(env_fns, seed=7, check_finite=check) for check in (True, False))
    for env in (checked, unchecked, unchecked):
        env.step(zeros(env))

    with pytest.raises(WorkerError, match=words):
        checked.step(zeros(checked))


@each_way
def test_check_finite_refuses_actions_that_are_nan(start: Make) -> None:
    env = start([NoisyEnv] * 2, seed=1, check_finite=True)

    with pytest.raises(ValueError, match="actions are not finite"):
        env.step(np.array([[np.nan, 0.0], [0.0, 0.0]], dtype=np.float32))


@each_way
def test_attributes_are_read_set_and_called_per_env(make: Make) -> None:
    env = make([CountingEnv] * 3)
    env.set_attr("length", [4, 5, 6])
    assert env.get_attr("length") == (4, 5, 6)
    env.set_attr("length", 7)
    assert env.call("length") == (7, 7, 7)

    with pytest.raises(ValueError, match="2 values given for 3 envs"):
        env.set_attr("length", [1, 2])
    with pytest.raises(ValueError, match=r"use its own step\(\)"):
        env.call("step")


@each_way
def test_render_returns_a_frame_per_env(start: Make) -> None:
    pytest.importorskip("pygame", reason="Gymnasium's CartPole renders with pygame")
    env = start([EnvFactory("CartPole-v1", kwargs={"render_mode": "rgb_array"})] * 2)

    frames = env.render()

    assert [frame.shape for frame in frames] == [(400, 600, 3)] * 2


@each_way
def test_calls_in_the_wrong_order_are_refused(start: Make) -> None:
    env = start([CountingEnv] * 2)
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    env.step_async(zeros(env))
    for call in (env.reset, lambda: env.step_async(zeros(env))):
        with pytest.raises(AlreadyPendingCallError):
            call()

    assert env.step_wait()[0].tolist() == [[1.0, 1.0]] * 2
    env.close()
    for call in (env.reset, lambda: env.step(zeros(env)), lambda: env.get_attr("length")):
        with pytest.raises(ClosedEnvironmentError):
            call()


@each_way
def test_a_vector_env_cannot_be_copied_or_pickled(make: Make) -> None:
    env = make([CountingEnv] * 2)

    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(env)


@each_way
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (NoisyEnv, "env 1 has observation_space"),
        (Path, r"the factory returned PosixPath, not a gymnasium\.Env"),
    ],
)
def test_a_factory_must_return_an_env_with_the_spaces_of_the_others(
    make: Make, second: Any, words: str, capfd: Capture
) -> None:
    with pytest.raises(WorkerError, match=words):
        make([CountingEnv, second])

    assert capfd.readouterr().err == "", "the workers must end silently"


@each_way
@pytest.mark.parametrize(("fault", "words"), [("raise", "puck left"), ("sys.exit", "SystemExit")])
def test_close_warns_about_an_env_that_raises_and_closes_the_others(
    start: Make, way: Any, fault: str, words: str, tmp_path: Path
) -> None:
    faulty = partial(FaultyEnv, fault, 7, "close")  # env 0: only in "parallel" it is in a worker
    env = start([faulty, faulty, partial(BulkyEnv, tmp_path / "closed")], seed=7)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.close()

    assert env.closed
    assert (tmp_path / "closed").exists()
    if way is not forked:  # a worker prints its warnings to its own stderr
        assert words in str(caught[0].message)


@pytest.mark.filterwarnings("error")
def test_close_does_not_raise_even_if_warnings_are_errors() -> None:
    env = SerialEnv([partial(FaultyEnv, "raise", 7, "close")] * 2, seed=7)
    env.reset()

    env.close()

    assert env.closed


def test_protocols_match_the_vector_envs_that_implement_them(make: Make) -> None:
    serial, parallel = SerialEnv([CountingEnv]), make([CountingEnv])

    assert isinstance(serial, Restorable)
    assert not isinstance(serial, (Resizable, HasWorkers))
    for protocol in (Restorable, Resizable, HasWorkers):
        assert isinstance(parallel, protocol)
