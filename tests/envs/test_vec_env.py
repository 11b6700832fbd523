"""ParallelEnv and SerialEnv: the contract of a VectorEnv, and what happens when envs misbehave."""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tiny_envs import (
    BulkyEnv,
    CountingEnv,
    FaultyEnv,
    InterruptingEnv,
    NoisyEnv,
    RegularEnv,
    UncloseableEnv,
    WorkerModules,
)

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv, WorkerError

STARTS = [("spawn", 2), ("fork", 1), ("fork", 2), ("fork", 4)]


def flat(value: Any) -> list[Any]:
    """All leaves of an observation or info, as bytes or plain values, in a fixed order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in [key, *flat(value[key])]]
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in flat(part)]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [leaf for part in value for leaf in flat(part)]
    if isinstance(value, str) or value is None:
        return [value]
    array = np.asarray(value)  # a Discrete observation may be an int or a NumPy one
    return [array.dtype.str, array.shape, array.tobytes()]


def trajectory(env: Any, n_steps: int = 60, seed: int = 5) -> str:
    """A hash of everything that a vector env hands out."""
    digest = hashlib.sha256()
    random = np.random.default_rng(0)
    digest.update(repr(flat(list(env.reset(seed=seed, options={"level": 1})))).encode())
    for _ in range(n_steps):
        action = random.uniform(-1, 1, size=(env.num_envs, 2)).astype(np.float32)
        digest.update(repr(flat(list(env.step(action)))).encode())
    env.close()
    return digest.hexdigest()


@pytest.mark.parametrize("kind", [NoisyEnv, RegularEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_everything_handed_out_equals_gymnasiums_sync_vector_env(
    mode: AutoresetMode, kind: Any
) -> None:
    env_fns = [kind] * 5
    expected = trajectory(SyncVectorEnv(env_fns, autoreset_mode=mode))

    assert trajectory(SerialEnv(env_fns, autoreset_mode=mode)) == expected
    for start_method, n_workers in STARTS:
        env = ParallelEnv(
            env_fns, n_workers=n_workers, start_method=start_method, autoreset_mode=mode
        )
        assert trajectory(env) == expected


def test_autoreset_disabled_wants_a_reset_by_mask() -> None:
    env = SerialEnv([partial(CountingEnv, 1), CountingEnv], autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=1)
    obs, _, terminated, _, _ = env.step(np.zeros(2, dtype=np.int64))
    assert terminated.tolist() == [True, False]
    with pytest.raises(WorkerError, match="autoreset is off"):
        env.step(np.zeros(2, dtype=np.int64))

    obs, _ = env.reset(options={"reset_mask": np.array([True, False])})
    assert obs[:, 0].tolist() == [0.0, 1.0]
    env.close()


def test_env_i_is_seeded_with_seed_plus_i_whatever_worker_it_lives_in() -> None:
    expected = [gym.make("CartPole-v1").reset(seed=7 + i)[0].tolist() for i in range(5)]

    for n_workers in (1, 2, 4):
        env = ParallelEnv(
            [EnvFactory("CartPole-v1")] * 5, seed=7, n_workers=n_workers, start_method="fork"
        )
        obs, _ = env.reset()
        assert obs.tolist() == expected
        again, _ = env.reset()
        assert again.tolist() != expected, "a reset without a seed must not replay"
        env.close()


def test_the_seed_of_the_constructor_waits_for_the_first_reset_of_each_env() -> None:
    expected = SerialEnv([NoisyEnv] * 2, seed=7).reset()[0]["vector"].tolist()
    for make in (SerialEnv, partial(ParallelEnv, start_method="fork")):
        env = make([NoisyEnv] * 2, seed=np.int64(7))
        with pytest.raises(TypeError, match="reset_mask"):
            env.reset(options={"reset_mask": [True, False]})
        first, _ = env.reset(options={"reset_mask": np.array([True, False])})
        second, _ = env.reset()

        assert first["vector"][0].tolist() == expected[0]
        assert second["vector"][1].tolist() == expected[1]
        assert second["vector"][0].tolist() != expected[0]
        env.close()


def test_envs_may_reuse_their_infos_and_change_the_options() -> None:
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

    parallel = [
        ParallelEnv([ReusingEnv] * 2, n_workers=n_workers, start_method="fork")
        for n_workers in (1, 2)
    ]
    for env in (SerialEnv([ReusingEnv] * 2), *parallel):
        _, infos = env.reset(seed=1, options={"level": 5})
        assert infos["level"].tolist() == [5, 5]
        for step in (1, 2):
            infos = env.step(np.zeros(2, dtype=np.int64))[4]
            assert infos["level"].tolist() == [step, step]
        infos = env.step(np.zeros(2, dtype=np.int64))[4]
        assert infos["final_info"]["level"].tolist() == [3, 3]
        assert infos["level"].tolist() == [-1, -1]
        env.close()


def test_actions_of_a_class_of_the_main_script_arrive_as_that_class() -> None:
    class Move:
        pass

    class MoveSpace(gym.spaces.Space[Any]):
        def sample(self, mask: Any = None, probability: Any = None) -> Any:
            return Move()

        def contains(self, x: Any) -> bool:
            return isinstance(x, Move)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, MoveSpace)

    class MovingEnv(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = MoveSpace()

        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, float(isinstance(action, Move)), *rest

    env = ParallelEnv([MovingEnv] * 2, n_workers=2, seed=1)
    env.reset()

    assert env.step((Move(), Move()))[1].tolist() == [1.0, 1.0]
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.worker_loads()


def test_final_obs_is_right_although_the_env_reuses_its_buffer() -> None:
    env = ParallelEnv([CountingEnv] * 2, start_method="fork", n_workers=2)
    env.reset(seed=1)
    for _ in range(3):
        obs, reward, terminated, _, infos = env.step(np.zeros(2, dtype=np.int64))

    assert terminated.all()
    assert obs.tolist() == [[0.0, 0.0]] * 2
    assert reward.tolist() == [30.0, 30.0]
    assert [final.tolist() for final in infos["final_obs"]] == [[3.0, 3.0]] * 2
    assert infos["final_info"]["step"].tolist() == [3, 3]
    env.close()


def test_what_a_step_handed_out_never_changes_later() -> None:
    env = ParallelEnv([CountingEnv], start_method="fork")
    env.reset(seed=1)
    kept = [env.step(np.zeros(1, dtype=np.int64)) for _ in range(2)]

    assert [step[0][0, 0] for step in kept] == [1.0, 2.0]
    assert [step[1][0] for step in kept] == [10.0, 20.0]
    env.close()


def test_without_copy_the_observations_are_views() -> None:
    env = ParallelEnv([CountingEnv], start_method="fork", copy=False)
    first, _ = env.reset(seed=1)
    second = env.step(np.zeros(1, dtype=np.int64))[0]

    assert first is second
    env.close()


def test_serial_and_parallel_name_a_fault_alike() -> None:
    for fault, words in [
        ("key error", r"env 1 \(seed 8\) raised:[\s\S]*KeyError: 'puck'"),
        ("wrong shape", r"env 1 \(seed 8\) raised:[\s\S]*shape \(1,\)[\s\S]*\(2,\)"),
        ("no reward", r"env 1 \(seed 8\) raised:[\s\S]*NoneType"),
        ("odd exception", r"env 1 \(seed 8\) raised:[\s\S]*OddError"),
    ]:
        env_fns = [partial(FaultyEnv, fault, 8)] * 2
        for env in (SerialEnv(env_fns, seed=7), ParallelEnv(env_fns, seed=7, start_method="fork")):
            with pytest.raises(WorkerError, match=words):
                play_two_steps(env)
            env.close()


def play_two_steps(env: Any) -> None:
    env.reset()
    for _ in range(2):
        env.step(np.zeros(env.num_envs, dtype=np.int64))


def test_a_fault_does_not_shift_later_replies() -> None:
    env_fns = [partial(FaultyEnv, "raise", 7)] * 4
    env = ParallelEnv(env_fns, seed=7, start_method="fork", n_workers=4)
    env.reset()
    env.step(np.zeros(4, dtype=np.int64))
    with pytest.raises(WorkerError):
        env.step(np.zeros(4, dtype=np.int64))

    obs = env.step(np.zeros(4, dtype=np.int64))[0]

    assert obs[:, 0].tolist() == [3.0] * 4
    env.close()


def test_a_factory_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    with pytest.raises(WorkerError, match=r"env 0 cannot be sent to a worker: .*lock"):
        ParallelEnv([lambda: CountingEnv(length=id(lock))])


def test_envs_with_different_spaces_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match="env 1 has observation_space"):
        ParallelEnv([CountingEnv, NoisyEnv], start_method="fork", n_workers=2)

    assert capfd.readouterr().err == "", "the workers must end without a word"


def test_a_worker_that_dies_before_it_takes_a_large_factory_is_an_error(tmp_path: Path) -> None:
    # Without the guard for __main__ a spawned worker starts workers itself, and dies of it.
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from functools import partial
from tiny_envs import CountingEnv
from ml_pipeline.envs.vec_env import ParallelEnv
class Heavy(CountingEnv):
    ballast = bytes(8_000_000)
ParallelEnv([Heavy])
"""
    )

    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 1
    assert "WorkerError: the worker of env 0 ended with exit code 1" in result.stderr


def test_after_an_interrupted_step_nothing_stale_is_handed_out_and_a_reset_goes_on() -> None:
    env = ParallelEnv([InterruptingEnv, CountingEnv], start_method="fork", n_workers=2)
    env.reset(seed=1)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2, dtype=np.int64))

    assert env.get_attr("length") == (3, 3)
    with pytest.raises(WorkerError, match="was interrupted"):
        env.step(np.zeros(2, dtype=np.int64))
    obs, _ = env.reset()
    assert obs[:, 0].tolist() == [0.0, 0.0]
    assert env.step(np.zeros(2, dtype=np.int64))[0][:, 0].tolist() == [1.0, 1.0]
    pids = env.worker_pids
    env.close()
    assert not [process for process in multiprocessing.active_children() if process.pid in pids]


def test_close_lets_an_env_close_although_a_large_reply_is_pending(tmp_path: Path) -> None:
    env = ParallelEnv([partial(BulkyEnv, tmp_path / "closed")], start_method="fork")
    env.reset(seed=1)
    env.step_async(np.zeros(1, dtype=np.int64))

    env.close(timeout=60)

    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("make", [SerialEnv, partial(ParallelEnv, start_method="fork")])
def test_an_env_that_raises_in_close_does_not_make_close_raise(make: Any) -> None:
    env = make([UncloseableEnv])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.close()

    if make is SerialEnv:  # a worker's warning goes to its own stderr
        assert any("the door is stuck" in str(each.message) for each in caught)


def test_an_env_that_is_never_closed_leaves_no_process() -> None:
    env = ParallelEnv([CountingEnv] * 2, start_method="fork")
    pids = env.worker_pids

    del env

    assert not [process for process in multiprocessing.active_children() if process.pid in pids]


def test_a_spawned_worker_has_no_torch_and_stays_small() -> None:
    env_fns = [EnvFactory("CartPole-v1"), EnvFactory(None, target="tiny_envs.WorkerModules")]
    cartpole = ParallelEnv(env_fns[:1] * 4, n_workers=4)
    cartpole.reset(seed=1)
    modules = ParallelEnv(env_fns[1:])

    assert modules.call("has_module", "torch") == (False,)
    if Path("/proc").exists():
        for pid in cartpole.worker_pids:
            status = Path(f"/proc/{pid}/status").read_text()
            kilobytes = int(status.partition("VmRSS:")[2].split()[0])
            assert kilobytes < 55_000
    cartpole.close()
    modules.close()


def test_several_envs_share_a_worker_in_contiguous_slices() -> None:
    env = ParallelEnv([WorkerModules] * 5, start_method="fork", n_workers=2)

    pids = env.call("pid")

    assert list(pids) == [env.worker_pids[0]] * 2 + [env.worker_pids[1]] * 3
    env.close()


def test_attributes_are_got_set_and_called_per_env() -> None:
    for env in (SerialEnv([CountingEnv] * 3), ParallelEnv([CountingEnv] * 3, start_method="fork")):
        env.set_attr("length", [4, 5, 6])
        assert env.get_attr("length") == (4, 5, 6)
        env.set_attr("length", 7)
        assert env.call("length") == (7, 7, 7)
        with pytest.raises(ValueError, match="2 values given for 3 envs"):
            env.set_attr("length", [1, 2])
        env.close()


def test_render_gives_a_frame_per_env() -> None:
    pytest.importorskip("pygame", reason="Gymnasium's CartPole draws with pygame")
    make = EnvFactory("CartPole-v1", kwargs={"render_mode": "rgb_array"})
    env = ParallelEnv([make] * 2, start_method="fork")
    env.reset(seed=1)

    frames = env.render()

    assert len(frames) == 2
    assert frames[0].shape == (400, 600, 3)
    env.close()


def test_a_vector_env_has_one_owner() -> None:
    env = ParallelEnv([CountingEnv] * 2, start_method="fork", n_workers=2, seed=1)
    env.reset()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a ParallelEnv cannot be copied or pickled"):
            duplicate(env)
    pid = os.fork()
    if pid == 0:
        try:
            env.step(np.zeros(2, dtype=np.int64))
        except WorkerError as error:
            os._exit(0 if "forked copy" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert env.step(np.zeros(2, dtype=np.int64))[0][:, 0].tolist() == [1.0, 1.0]
    env.close()


def test_seeds_may_be_numpys_one_by_one_too() -> None:
    env = SerialEnv([NoisyEnv] * 2)
    expected = env.reset(seed=[3, 4])[0]["vector"].tolist()

    assert env.reset(seed=np.array([3, 4]))[0]["vector"].tolist() == expected
    assert env.reset(seed=[np.int64(3), 4])[0]["vector"].tolist() == expected


def test_steps_out_of_turn_are_refused() -> None:
    env = ParallelEnv([CountingEnv], start_method="fork")
    env.reset(seed=1)
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    env.step_async(np.zeros(1, dtype=np.int64))
    for call in (env.reset, lambda: env.step_async(np.zeros(1, dtype=np.int64))):
        with pytest.raises(AlreadyPendingCallError):
            call()

    assert env.step_wait()[0].tolist() == [[1.0, 1.0]]
    env.close()


def test_two_parallel_envs_live_side_by_side() -> None:
    first = ParallelEnv([CountingEnv] * 2, start_method="fork", n_workers=2)
    second = ParallelEnv([CountingEnv] * 2, start_method="fork", n_workers=2)
    for env in (first, second):
        env.reset(seed=1)
    first.step(np.zeros(2, dtype=np.int64))
    first.close()

    assert second.step(np.zeros(2, dtype=np.int64))[0][:, 0].tolist() == [1.0, 1.0]
    second.close()


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads the worker's command in /proc")
def test_a_default_start_method_left_behind_by_others_is_not_inherited() -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)  # joblib's launcher leaves "loky"
    try:
        env = ParallelEnv([CountingEnv])
        command = Path(f"/proc/{env.worker_pids[0]}/cmdline").read_text()
        env.close()
    finally:
        multiprocessing.set_start_method(before, force=True)

    assert "spawn_main" in command
