"""TorchVectorEnv: autoreset, seeds, saved states, and a single env of a task."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, VectorEnv
from tiny_torch_envs import Forbidding, Leaves, Stages, Steered
from torch import Tensor

from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.envs.tensor_env import EnvState, SingleTorchEnv, TorchVectorEnv


class Walk(TorchVectorEnv):
    """Starts in [0, 1) and moves by -1 or +1; the reward is the place; terminates at 3."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Discrete(2)
    n_draws: ClassVar[int] = 1

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        (draw,) = draws
        return draw, draw[:, None, None].expand(-1, 2, 3).clone()  # a state with more dimensions

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        place = state[0] + 2.0 * action - 1.0
        return (place, state[1]), place, place >= 3.0

    def observe(self, state: EnvState) -> Tensor:
        return torch.stack((state[0], state[1][:, 1, 2]), dim=1)


UP, DOWN = 1, 0


def walk(n_envs: int, **options: Any) -> Walk:
    """A walk that was reset."""
    env = Walk(n_envs, **{"seed": 1, **options})
    env.reset()
    return env


def play(env: TorchVectorEnv, n_steps: int, seed: int = 0) -> list[Tensor]:
    """The results of each step, one row per env; the actions of env i depend only on i."""
    rows = []
    for t in range(n_steps):
        draws = [np.random.default_rng([seed, t, i]).integers(2) for i in range(env.num_envs)]
        obs, reward, terminated, truncated, infos = env.step(torch.tensor(np.array(draws)))
        columns = (reward, terminated, truncated, infos["episode"]["r"], infos["episode"]["l"])
        rows.append(torch.cat((obs, infos["final_obs"], torch.stack(columns, dim=1)), dim=1))
    return rows


def test_it_is_a_gymnasium_vector_env() -> None:
    env = Walk(3, seed=1)
    obs, infos = env.reset()

    assert isinstance(env, VectorEnv)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.num_envs == 3
    assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.observation_space.shape == (3, 2)
    assert env.observation_space.contains(obs.numpy())
    assert infos == {}
    env.close()
    env.close()
    assert env.closed


def test_final_obs_is_the_end_of_an_episode_and_obs_the_start_of_the_next() -> None:
    env = Walk(2, seed=1)
    first, _ = env.reset()
    start = first[:, 0]
    for _ in range(2):
        obs, _, terminated, _, infos = env.step(torch.tensor([UP, UP]))
        assert not terminated.any()
        assert torch.equal(obs, infos["final_obs"])
        assert not infos["_final_obs"].any()

    obs, reward, terminated, truncated, infos = env.step(torch.tensor([UP, UP]))

    assert terminated.tolist() == [True, True]
    assert truncated.tolist() == [False, False]
    assert torch.equal(infos["final_obs"][:, 0], start + 1 + 1 + 1)
    assert torch.equal(reward, infos["final_obs"][:, 0])
    assert ((obs[:, 0] >= 0) & (obs[:, 0] < 1) & (obs[:, 0] != start)).all()
    assert torch.equal(obs[:, 0], obs[:, 1])  # every part of the state is new
    assert infos["_final_obs"].all()
    assert infos["_episode"].all()
    assert infos["episode"]["l"].tolist() == [3, 3]
    assert torch.allclose(infos["episode"]["r"], 3 * start + 6)
    assert env.position.n_steps.tolist() == [0, 0]
    assert env.position.episode_return.tolist() == [0.0, 0.0]
    assert env.position.n_episodes.tolist() == [2, 2]


def test_only_envs_whose_episode_ended_are_reset() -> None:
    env = Walk(3, seed=1)
    start, _ = env.reset()
    up_down_up = torch.tensor([UP, DOWN, UP])
    for _ in range(3):
        obs, _, terminated, _, _ = env.step(up_down_up)

    assert terminated.tolist() == [True, False, True]
    assert obs[1, 0] == start[1, 0] - 3
    assert obs[[0, 2], 0].max() < 1
    assert env.position.n_episodes.tolist() == [2, 1, 2]
    assert env.position.n_steps.tolist() == [0, 3, 0]


def test_only_the_time_limit_truncates_and_it_does_not_terminate() -> None:
    limited, unlimited = walk(2, max_episode_steps=3), walk(2)
    for _ in range(2):
        assert not limited.step(torch.tensor([UP, DOWN]))[3].any()

    _, _, terminated, truncated, infos = limited.step(torch.tensor([UP, DOWN]))

    assert terminated.tolist() == [True, False]
    assert truncated.tolist() == [True, True]  # like Gymnasium's TimeLimit, also if it terminated
    assert infos["_final_obs"].tolist() == [True, True]
    for _ in range(50):
        assert not unlimited.step(torch.tensor([UP, DOWN]))[3].any()


def test_env_i_has_seed_plus_i_and_plays_the_same_in_a_batch_of_any_size() -> None:
    few, many = (walk(n_envs, max_episode_steps=9) for n_envs in (3, 8))
    first, _ = Walk(3, seed=10).reset()
    second, _ = Walk(3, seed=11).reset()

    for row_few, row_many in zip(play(few, 40), play(many, 40), strict=True):
        assert torch.equal(row_few, row_many[:3])
    assert torch.equal(first[1:], second[:2])
    assert len(set(first[:, 0].tolist())) == 3


def test_a_reset_with_a_seed_repeats_and_without_one_continues() -> None:
    env = Walk(2, seed=7)
    first, _ = env.reset()
    next_one, _ = env.reset()
    again, _ = env.reset(seed=7)

    assert torch.equal(first, again)
    assert not torch.equal(first, next_one)
    assert torch.equal(env.reset()[0], next_one)
    assert not torch.equal(Walk(2).reset()[0], Walk(2).reset()[0])


def test_a_loaded_state_continues_bit_for_bit(tmp_path: Any) -> None:
    env = TorchCartPole(5, seed=3, max_episode_steps=30)
    env.reset()
    play(env, 45)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    wanted = play(env, 60, seed=1)

    other = TorchCartPole(5, max_episode_steps=30)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))

    assert all(map(torch.equal, play(other, 60, seed=1), wanted))


def test_a_saved_state_does_not_change_with_the_env() -> None:
    env = walk(2, seed=3)
    saved = env.state_dict()
    place = saved["state"][0].clone()
    play(env, 5)
    env.reset(seed=9)

    assert saved["seeds"].tolist() == [3, 4]
    assert torch.equal(saved["state"][0], place)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"\(2,\) of integers on cpu, got \(3,\)"),
        (torch.zeros(2, 1, dtype=torch.int64), r"got \(2, 1\)"),
        (torch.zeros(2), "got .* of torch.float32"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "got .* on meta"),
        (np.zeros(2, dtype=np.int64), "got ndarray; use torch.as_tensor"),
    ],
)
def test_an_action_of_wrong_shape_dtype_or_device_is_refused(action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        walk(2).step(action)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Walk(0), "num_envs must be at least 1, got 0"),
        (lambda: Walk(1, max_episode_steps=0), "max_episode_steps must be at least 1, got 0"),
        (lambda: Walk(1, seed=-1), r"between 0 and 2\^62 - 1, got -1"),
        (lambda: Walk(1, seed=2**62), rf"between 0 and 2\^62 - 1, got {2**62}"),
        (lambda: Walk(1).reset(options={"low": 1}), "Walk takes no options"),
        (lambda: Walk(2).load_state_dict(Walk(3).state_dict()), "num_envs=2: .* use num_envs=3"),
        (lambda: Walk(3).load_state_dict(TorchCartPole(3).state_dict()), "the task that saved it"),
        (lambda: Walk.single_env(render_mode="rgb_array"), "Walk cannot be rendered"),
        (lambda: Stages(2).set_attr("size", 1), "size: Stages has no such setting; it has: length"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(ResetNeeded, match="call reset first"):
        Walk(1).step(torch.tensor([UP]))


def test_step_and_transition_agree() -> None:
    env = walk(4, seed=2, max_episode_steps=7)
    position = env.position
    for t in range(30):  # in most steps no episode ends, and step skips the autoreset
        action = torch.full((4,), t % 3 % 2)
        before = [part.clone() for part in (*position.state, *position[1:])]
        next_position, result = env.transition(position, action)
        assert all(map(torch.equal, before, (*position.state, *position[1:])))
        obs, reward, _, truncated, infos = env.step(action)

        position = next_position
        assert torch.equal(obs, result.obs)
        assert torch.equal(reward, result.reward)
        assert torch.equal(truncated, result.truncated)
        assert torch.equal(infos["final_obs"], result.final_obs)
        assert torch.equal(infos["episode"]["r"], result.episode_return)
        assert all(map(torch.equal, position.state, env.position.state))
        assert torch.equal(position.n_episodes, env.position.n_episodes)


def test_reset_and_load_keep_the_address_of_the_seeds() -> None:
    env = Walk(2, seed=1)
    address = env.seeds.data_ptr()  # a captured CUDA graph reads from it
    env.reset(seed=5)
    assert env.seeds.tolist() == [5, 6]
    env.load_state_dict(Walk(2, seed=8).state_dict())

    assert env.seeds.tolist() == [8, 9]
    assert env.seeds.data_ptr() == address


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_single_env_is_a_plain_gymnasium_env() -> None:
    check_env(SingleTorchEnv(Walk, max_episode_steps=20), skip_render_check=True)


def test_a_single_env_does_not_autoreset_and_plays_like_env_0_of_the_batch() -> None:
    single, batch = SingleTorchEnv(Walk), Walk(2)
    obs, _ = single.reset(seed=6)
    start, _ = batch.reset(seed=6)
    assert obs.tolist() == start[0].tolist()

    for _ in range(3):
        obs, reward, terminated, truncated, _ = single.step(np.int64(UP))
        next_start, rewards, _, _, infos = batch.step(torch.tensor([UP, UP]))
        assert obs.tolist() == infos["final_obs"][0].tolist()
        assert reward == rewards[0].item()

    assert (terminated, truncated) == (True, False)
    assert single.reset()[0].tolist() == next_start[0].tolist()


def test_an_action_of_several_parts_has_one_tensor_for_each() -> None:
    single, batch = SingleTorchEnv(Steered), Steered(1)
    single.reset(seed=6)
    batch.reset(seed=6)
    single.action_space.seed(1)

    for _ in range(7):
        action = single.action_space.sample()
        obs, reward, _, truncated, _ = single.step(action)
        force, side = torch.from_numpy(action["force"][0])[None], torch.tensor([action["side"]])
        _, rewards, _, _, infos = batch.step({"force": (force,), "side": side})
        assert obs.tolist() == infos["final_obs"][0].tolist()
        assert reward == rewards[0].item()
    assert truncated

    for wrong in (force, {"side": side}, {"force": [force], "side": side}):
        with pytest.raises(ValueError, match="actions must be one tensor for each part of"):
            batch.step(wrong)
    with pytest.raises(ValueError, match=r"\(1,\) of integers on cpu, got \(1, 1\)"):
        batch.step({"force": (force,), "side": side[None]})


def test_the_single_env_of_a_task_with_a_gymnasium_id_is_gymnasiums_own() -> None:
    single = TorchCartPole.single_env(max_episode_steps=7)

    assert type(single.unwrapped) is type(gym.make("CartPole-v1").unwrapped)
    assert single.spec is not None
    assert single.spec.max_episode_steps == 7
    assert isinstance(Walk.single_env(max_episode_steps=7), SingleTorchEnv)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_single_env_observes_each_part_like_env_0_of_the_batch() -> None:
    single, batch = Leaves.single_env(), Leaves(2)
    check_env(single, skip_render_check=True)
    obs, _ = single.reset(seed=6)
    start, _ = batch.reset(seed=6)
    assert obs["parts"][0] == start["parts"][0][0]

    for _ in range(3):
        obs, *_ = single.step(1)
        *_, infos = batch.step(torch.tensor([1, 1]))
        final = infos["final_obs"]
        assert obs["arm"]["angles"].tolist() == final["arm"]["angles"][0].tolist()
        assert np.array_equal(obs["image"], final["image"][0].numpy())
        assert obs["parts"][1].tolist() == final["parts"][1][0].tolist()


def test_infos_and_single_envs_have_the_masks_of_the_task() -> None:
    batch, single = Forbidding(2), Forbidding.single_env()
    _, infos = batch.reset(seed=3)
    _, info = single.reset(seed=3)
    # Env i forbids the entry -(i + t) mod 4, and an episode of env 0 has three steps.
    assert (~infos["action_mask"]).nonzero()[:, 1].tolist() == [0, 3]

    for t in (1, 2, 3):
        assert infos["action_mask"][0].tolist() == info["action_mask"].tolist()
        *_, infos = batch.step(torch.tensor([1, 1]))
        _, _, terminated, _, info = single.step(1)
        assert info["action_mask"].tolist() == [entry != -t % 4 for entry in range(4)]

    assert terminated
    assert infos["final_info"]["action_mask"][0].tolist() == info["action_mask"].tolist()
    assert infos["action_mask"][0].tolist() == [False, True, True, True]  # of the next episode


def test_a_setting_takes_effect_at_the_next_start_of_each_env() -> None:
    env = Stages(2, seed=1)
    address = env.length.data_ptr()
    env.reset()
    env.set_attr("length", [3, 1])
    actions = torch.zeros(2, dtype=torch.int64)

    ended = [env.step(actions)[2].tolist() for _ in range(5)]

    # Two steps with the old length, then three in env 0 and one at a time in env 1.
    assert ended == [[False, False], [True, True], [False, True], [False, True], [True, True]]
    assert env.length.data_ptr() == address  # a captured graph reads it there


def test_returns_and_single_envs_keep_the_reward_of_the_task() -> None:
    env, single = Stages(1, seed=1), Stages.single_env()
    env.reset()
    single.reset(seed=1)
    actions = torch.zeros(1, dtype=torch.int64)
    env.step(actions)

    _, reward, *_, infos = env.step(actions)

    assert reward.tolist() == [11.0]
    assert infos["episode"]["r"].tolist() == [2.0]
    assert single.step(0)[1] == 1.0
