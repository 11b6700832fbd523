"""Tensor tasks, each compared step by step with its reference: Gymnasium's own env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensor_transitions import check_compiles_as_one_graph, check_stays_on_the_device
from torch import Tensor

from ml_pipeline.envs.classic_control.acrobot import TorchAcrobot
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.envs.classic_control.mountain_car_continuous import TorchMountainCarContinuous
from ml_pipeline.envs.classic_control.pendulum import TorchPendulum
from ml_pipeline.envs.tensor_env import TorchVectorEnv

TASKS = [TorchCartPole, TorchPendulum, TorchAcrobot, TorchMountainCarContinuous]
Task = type[TorchVectorEnv]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)

# Bounds of the first state, from Gymnasium's documentation.
BOUNDS = {
    TorchCartPole: [(-0.05, 0.05)] * 4,
    TorchPendulum: [(-np.pi, np.pi), (-1.0, 1.0)],
    TorchAcrobot: [(-0.1, 0.1)] * 4,
    TorchMountainCarContinuous: [(-0.6, -0.4), (0.0, 0.0)],
}


def reference_of(task: Task, seed: int) -> gym.Env[Any, Any]:
    assert task.gymnasium_id is not None
    env = gym.make(task.gymnasium_id)
    env.reset(seed=seed)
    return env


def state_of(reference: gym.Env[Any, Any]) -> tuple[Tensor, ...]:
    state = np.asarray(reference.unwrapped.state, dtype=np.float32)  # type: ignore[attr-defined]
    return tuple(torch.tensor([number]) for number in state)


def put(env: TorchVectorEnv, state: tuple[Tensor, ...], n_steps: int = 0) -> None:
    env.position = env.position._replace(state=state, n_steps=torch.tensor([n_steps]))


class Driver:
    """Actions that reach the end of an episode: random, but mostly along the current motion."""

    def __init__(self, task: Task, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.task = task

    def action(self, reference: gym.Env[Any, Any]) -> Any:
        # Some are outside the bounds: Pendulum and MountainCar clip actions.
        if self.task is TorchPendulum:
            return self.random.uniform(-3.0, 3.0, 1).astype(np.float32)
        state = reference.unwrapped.state  # type: ignore[attr-defined]
        with_the_motion = self.random.random() < 0.8
        if self.task is TorchMountainCarContinuous:
            push = np.sign(state[1]) if with_the_motion else self.random.uniform(-2.0, 2.0)
            return np.array([push], dtype=np.float32)
        if self.task is TorchAcrobot:
            return np.int64(1 + np.sign(state[3]) if with_the_motion else self.random.integers(3))
        return self.random.integers(2)


def step_both(
    env: TorchVectorEnv, reference: gym.Env[Any, Any], action: Any, tolerance: float
) -> bool:
    """Step both, compare their results, and return whether the episode ended."""
    obs, reward, terminated, truncated, _ = reference.step(action)
    batch = torch.as_tensor(np.asarray(action))[None]
    _, our_reward, our_terminated, our_truncated, infos = env.step(batch)

    np.testing.assert_allclose(infos["final_obs"][0], obs, rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(our_reward.item(), reward, rtol=1e-5, atol=tolerance)
    assert our_terminated.item() == terminated
    assert our_truncated.item() == truncated
    return terminated or truncated


@each_task
@pytest.mark.slow
def test_every_step_equals_that_of_the_reference(task: Task) -> None:
    env = task(1, seed=0)
    env.reset()
    n_ended = 0
    for seed in range(2):
        reference, driver = reference_of(task, seed), Driver(task, seed)
        n_steps = 0
        for _ in range(400):
            put(env, state_of(reference), n_steps)
            n_steps += 1
            if step_both(env, reference, driver.action(reference), 2e-5):
                reference.reset()
                n_ended += 1
                n_steps = 0
    assert n_ended >= 2


@each_task
def test_whole_episodes_stay_close_to_the_reference(task: Task) -> None:
    reference, driver = reference_of(task, 5), Driver(task, 5)
    env = task(1, seed=0)
    env.reset()
    put(env, state_of(reference))

    for _ in range(25):
        if step_both(env, reference, driver.action(reference), 1e-3):
            break


@each_task
def test_spaces_and_time_limit_equal_those_of_the_reference(task: Task) -> None:
    env, reference = task(2), reference_of(task, 0)

    assert env.single_observation_space == reference.observation_space
    assert env.single_action_space == reference.action_space
    assert reference.spec is not None
    assert env.max_episode_steps == reference.spec.max_episode_steps


@each_task
def test_first_states_are_uniform_within_the_bounds_of_the_reference(task: Task) -> None:
    n = 4000
    env = task(n, seed=0)
    env.reset()

    for part, (low, high) in zip(env.position.state, BOUNDS[task], strict=True):
        assert part.min() >= low - 1e-7
        assert part.max() <= high + 1e-7
        width = high - low
        assert abs(part.mean() - (low + high) / 2) <= 4 * width / np.sqrt(12 * n) + 1e-7
        assert part.max() - part.min() >= 0.99 * width
    parts = torch.stack(env.position.state)
    moving = parts[parts.std(1) > 0]
    correlation = torch.corrcoef(moving).reshape(len(moving), len(moving))
    assert (correlation - torch.eye(len(moving))).abs().max() < 4 / np.sqrt(n)
    # The reference starts within the same bounds.
    state = torch.cat(state_of(reference_of(task, 1)))
    for number, (low, high) in zip(state, BOUNDS[task], strict=True):
        assert low <= number <= high


@each_task
def test_observations_are_in_the_space_and_float32(task: Task) -> None:
    env = task(64, seed=0, max_episode_steps=40)
    env.reset()
    env.action_space.seed(0)

    for _ in range(100):
        action = torch.as_tensor(env.action_space.sample())
        position, result = env.transition(env.position, action)
        env.step(action)
        assert env.observation_space.contains(result.obs.numpy())
        for tensor in (*position.state, result.reward, result.obs, result.episode_return):
            assert tensor.dtype == torch.float32
    assert env.position.n_episodes.min() >= 3


@each_task
def test_a_transition_never_reads_from_the_device_and_has_no_float64(task: Task) -> None:
    dtypes = check_stays_on_the_device(task(4, seed=1, max_episode_steps=3))

    assert torch.float64 not in dtypes


@pytest.mark.parametrize(
    "task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.slow) for task in TASKS[1:])]
)
def test_a_transition_compiles_as_one_graph(task: Task) -> None:
    check_compiles_as_one_graph(task(4, seed=1, max_episode_steps=2))


def test_the_car_stops_at_the_wall() -> None:
    env = TorchMountainCarContinuous(1, seed=0)
    env.reset()
    put(env, (torch.tensor([-1.19]), torch.tensor([-0.07])))

    obs, *_ = env.step(torch.tensor([[-1.0]]))

    assert obs.tolist() == [[np.float32(-1.2), 0.0]]


def test_the_pole_falls_beyond_12_degrees_and_that_step_still_has_reward_1() -> None:
    env = TorchCartPole(2, seed=0)
    env.reset()
    zero, angle = torch.zeros(2), torch.deg2rad(torch.tensor([11.9, 12.1]))
    env.position = env.position._replace(state=(zero, zero, angle, zero))

    _, reward, terminated, _, _ = env.step(torch.tensor([0, 0]))

    assert terminated.tolist() == [False, True]
    assert reward.tolist() == [1.0, 1.0]
