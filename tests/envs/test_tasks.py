"""The tasks and wrappers of this package: their rewards, masks and observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ml_pipeline.envs.tasks.camera_and_flag import CameraAndFlag
from ml_pipeline.envs.tasks.corridor import Corridor
from ml_pipeline.envs.tasks.crowded_keys import CrowdedKeys
from ml_pipeline.envs.tasks.lanes import Lanes
from ml_pipeline.envs.wrappers.hide_velocity import HideVelocity


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [CrowdedKeys, CameraAndFlag, Lanes, Corridor])
def test_gymnasiums_env_checker_accepts_the_task(make: Any) -> None:
    check_env(make(), skip_render_check=True)


def test_the_nearest_working_key_gives_one_and_a_broken_key_ends_the_episode() -> None:
    env = CrowdedKeys(n_keys=8, n_working=2)
    tone, info = env.reset(seed=1)
    working = np.flatnonzero(info["action_mask"])
    distances = np.abs(working - tone)

    _, best, over, _, _ = env.step(working[distances.argmin()])
    assert (best, over) == (1.0, False)

    tone, info = env.reset(seed=1)
    _, other, _, _, _ = env.step(working[distances.argmax()])
    assert other == 1.0 - (distances.max() - distances.min()) / 8

    env.reset(seed=1)
    broken = np.flatnonzero(info["action_mask"] == 0)[0]
    assert env.step(broken)[1:3] == (0.0, True)


def test_the_flag_decides_which_quarter_is_right() -> None:
    env = CameraAndFlag(size=4, length=1000)
    obs, _ = env.reset(seed=1)
    flags = set()
    for _ in range(50):
        row, column, _ = np.argwhere(obs["camera"])[0]
        quarter = 2 * (row >= 2) + (column >= 2)
        flags.add(float(obs["flag"][0]))
        obs, reward, _, _, _ = env.step(quarter if obs["flag"][0] > 0 else 3 - quarter)
        assert reward == 1.0
    assert flags == {-1.0, 1.0}


def test_lane_and_speed_each_cost_their_distance_from_the_best() -> None:
    env = Lanes()
    limits, info = env.reset(seed=1)
    best, other = int(limits.argmax()), int(np.argsort(limits)[-2])
    assert sorted(np.flatnonzero(info["action_mask"]["lane"])) == sorted([best, other])

    for lane, speed in ((best, limits[best]), (best, limits[best] - 0.25), (other, limits[other])):
        env.reset(seed=1)
        _, reward, over, _, _ = env.step({"lane": lane, "speed": np.array([speed])})
        cost = limits[best] - limits[lane] + abs(speed - limits[lane])
        assert reward == pytest.approx(1.0 - cost)
        assert not over
    env.reset(seed=1)
    closed = int(np.flatnonzero(info["action_mask"]["lane"] == 0)[0])
    assert env.step({"lane": closed, "speed": np.zeros(1)})[1:3] == (0.0, True)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_last_action_must_repeat_the_sign_of_the_first_step(seed: int) -> None:
    env = Corridor(length=3)
    sign, _ = env.reset(seed=seed)
    right = int(sign[0] > 0)

    for last, wanted in ((right, 1.0), (1 - right, 0.0)):
        env.reset(seed=seed)
        steps = [env.step(action) for action in (right, 1 - right, last)]
        assert [obs.tolist() for obs, *_ in steps] == [[0, 0], [0, 1], [0, 0]]
        assert [step[1:3] for step in steps] == [(0.0, False), (0.0, False), (wanted, True)]


def test_hidden_numbers_are_removed_from_observation_and_space() -> None:
    env = HideVelocity(gym.make("CartPole-v1"))
    obs, _ = env.reset(seed=1)
    whole, _ = gym.make("CartPole-v1").reset(seed=1)

    assert obs.tolist() == whole[[0, 2]].tolist()
    assert env.observation_space.shape == (2,)
    with pytest.raises(ValueError, match="needs a vector observation"):
        HideVelocity(CameraAndFlag())


@pytest.mark.parametrize(
    "make",
    [lambda: CrowdedKeys(4, 9), lambda: CameraAndFlag(5), lambda: Lanes(2, 3), lambda: Corridor(1)],
)
def test_impossible_sizes_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
