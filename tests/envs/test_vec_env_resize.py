"""ParallelEnv.resize: more or fewer envs; those that stay continue as if nothing happened."""

from __future__ import annotations

import os
import signal
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from conftest import Capture, Make, read_rows, small
from faulty_envs import WorkerModules, faulty_factory
from gymnasium import spaces
from tiny_envs import CountingEnv, NoisyEnv, SpaceEnv
from vec_envs import zeros

from ml_pipeline.assembly.run import train
from ml_pipeline.envs.vec_env import WorkerError


@pytest.mark.parametrize("main_slice", [False, True])
def test_envs_that_stay_continue_bit_for_bit(start: Make, main_slice: bool) -> None:
    resized, plain = (start([NoisyEnv] * 4, seed=3, main_slice=main_slice) for _ in range(2))
    random = np.random.default_rng(1)

    for n_envs in (4, 7, 2, 2, 9, 4):
        obs, _ = resized.resize(n_envs)
        assert obs["vector"].shape == (n_envs, 3)
        assert resized.observation_space["vector"].shape == (n_envs, 3)
        action = random.uniform(-1, 1, size=(9, 2)).astype(np.float32)
        ours, theirs = resized.step(action[:n_envs]), plain.step(action[:4])
        assert ours[0]["vector"][:2].tolist() == theirs[0]["vector"][:2].tolist()
        assert ours[1][:2].tolist() == theirs[1][:2].tolist()


def test_new_envs_are_seeded_reset_and_spread_over_the_workers(start: Make) -> None:
    env = start([WorkerModules] * 2, seed=3, n_workers=4)
    env.step(zeros(env))
    assert env.n_workers == 2

    obs, _ = env.resize(8)

    assert obs[:, 0].tolist() == [1.0, 1.0] + [0.0] * 6
    assert env.n_workers == 4
    pids = env.call("pid")
    assert sorted(pids.count(pid) for pid in env.worker_pids) == [2, 2, 2, 2]
    assert env.np_random_seed == tuple(range(3, 11))
    before = pids[:2]
    env.resize(1)
    assert env.call("pid") == before[:1]
    assert env.n_workers == 1
    assert env.step(zeros(env))[0][:, 0].tolist() == [2.0]


def test_envs_that_stay_keep_observations_that_are_objects(make: Make) -> None:
    env = make([partial(SpaceEnv, spaces.Text(6), spaces.Discrete(2))] * 2)
    before, _ = env.reset()

    obs, _ = env.resize(3)

    assert obs[:2] == before
    assert isinstance(obs[2], str)


@pytest.mark.parametrize(
    ("fault", "n_workers", "words"),
    [("raise", 2, "env 3"), ("exit", 4, "env 3 ended with exit code 7")],
)
def test_an_env_that_cannot_be_built_changes_nothing(
    start: Make, fault: str, n_workers: int, words: str
) -> None:
    env = start([CountingEnv] * 2, n_workers=n_workers)
    env.step(zeros(env))
    env.env_fns = [CountingEnv, partial(faulty_factory, fault)]

    with pytest.raises(WorkerError, match=words):
        env.resize(4)

    assert env.num_envs == 2
    assert env.step(zeros(env))[0][:, 0].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="at least 1"):
        env.resize(0)


@pytest.mark.parametrize("n_envs", [1, 6])
@pytest.mark.parametrize("main_slice", [False, True])
def test_a_lost_worker_is_an_error_and_changes_nothing(
    start: Make, n_envs: int, main_slice: bool
) -> None:
    env = start([CountingEnv] * 4, seed=1, main_slice=main_slice, on_worker_death="restart")
    env.step(zeros(env))
    os.kill(env.worker_pids[-1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        env.resize(n_envs)

    assert env.num_envs == 4
    with pytest.warns(RuntimeWarning, match="restart 1"):
        obs, _, _, truncated, _ = env.step(zeros(env))
    assert truncated.tolist() == [False, False, True, True]
    assert obs[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert env.resize(n_envs)[0].shape == (n_envs, 2)


@pytest.mark.slow
def test_training_follows_the_number_of_free_cores(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    loads = chain([0.0, 0.0, 100.0, 100.0], repeat(0.0))
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr("ml_pipeline.callbacks.scaling.available_cores", lambda: 2)
    settings = ["callbacks=scaling", "callbacks.scaling.every=1", "callbacks.scaling.min_envs=2"]

    result = train(
        [
            *small(n_envs=4, total_steps=2048),
            *settings,
            "callbacks.scaling.envs_per_core=4",
            "vec_env=parallel",
            "vec_env.start_method=fork",
        ]
    )

    n_envs = [int(row["n_envs"]) for row in read_rows(result.run_dir)]
    assert n_envs[:5] == [4, 8, 8, 2, 2]
    assert "0.0 of 2 cores are free: changed from 8 to 2 envs" in capsys.readouterr().out


def test_scaling_requires_workers(here: Path) -> None:
    with pytest.raises(Exception, match="needs envs in workers"):
        train([*small(), "callbacks=scaling", "vec_env=serial"])


def test_new_envs_have_the_attributes_that_were_set(start: Make) -> None:
    env = start([partial(CountingEnv, 50)] * 2, n_workers=2)
    env.set_attr("length", [3, 4])

    env.resize(5)

    assert env.get_attr("length") == (3, 4, 3, 4, 3)
