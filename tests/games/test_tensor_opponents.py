"""TensorSelfPlay: the same games, counted by an opponent pool, and seats that change hands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ml_pipeline.algorithms.sac.agent import SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.envs.tensor_env import join_position, position_parts
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.tensor_self_play import TensorSelfPlay
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.worlds.hockey.env import ACTIONS, OBSERVATIONS
from ml_pipeline.worlds.hockey.tensor_env import TorchHockey


def agent_of(seed: int) -> Any:
    context = RunContext.alone(seed=seed)
    return SACAgent(Spaces(OBSERVATIONS, ACTIONS), MLP, SACConfig(), context)


def made(n_envs: int, **settings: Any) -> tuple[TensorSelfPlay, OpponentPool]:
    players = dict.fromkeys(TorchHockey.scripted_players)
    pool = OpponentPool(agent_of(0).greedy(), OpponentConfig(**settings), players, seed=1)
    pool.add(agent_of(0).greedy(), 0)
    inner = TorchHockey(n_envs, opponent=None, mode="shooting", seed=7)
    return TensorSelfPlay(inner, pool), pool


def actions_of(obs: torch.Tensor, t: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(t)
    return torch.rand((len(obs), 4), generator=generator) * 2 - 1


@pytest.mark.parametrize("name", ["weak", "strong"])
@pytest.mark.slow
def test_games_equal_those_against_the_scripted_player_inside_the_env(name: str) -> None:
    ours, _ = made(16, scripted={name: 1.0})
    theirs = TorchHockey(16, opponent=name, mode="shooting", seed=7)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    torch.testing.assert_close(ours.reset(seed=7)[0], theirs.reset(seed=7)[0], rtol=0, atol=0)
    n_ended = 0
    for t in range(100):
        actions = actions_of(ours.position.n_steps, t)
        one, other = ours.step(actions), theirs.step(actions)
        for mine, expected in zip(one[:4], other[:4], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        n_ended += int((one[2] | one[3]).sum())
        if bool((one[2] | one[3]).any()):
            torch.testing.assert_close(one[4]["final_obs"], other[4]["final_obs"], rtol=0, atol=0)
    assert n_ended >= 16
    assert int(ours.games().sum()) == n_ended


def test_past_selves_act_in_their_seats_as_they_do_alone() -> None:
    env, pool = made(8)
    for number in (1, 2):
        pool.add(agent_of(number).greedy(), number)
    env.sit_down(1, pool.selves[1])
    env.sit_down(3, pool.selves[2])
    obs = torch.randn((8, 18), generator=torch.Generator().manual_seed(0))
    seat = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])

    actions = env.act_in_seats(obs, seat)

    for row, number in enumerate([0, 1, 0, 2] * 2):
        expected = agent_of(number).act_batch(obs[row : row + 1].numpy(), True)[0]
        np.testing.assert_allclose(actions[row].numpy(), expected, atol=1e-5)
    env.close()


@pytest.mark.slow
def test_a_seat_changes_hands_only_when_nobody_plays_in_it() -> None:
    env, pool = made(32, sampling="latest", capacity=3)
    env.reset(seed=1)
    before = {name: each.clone() for name, each in env._weights.items()}
    seats_of_newest = 0
    for t in range(8):
        pool.add(agent_of(t + 1).greedy(), 100 * (t + 1))
        for step in range(20):
            env.step(actions_of(env.position.n_steps, 20 * t + step))
        playing = env.players()
        pool.between_iterations()
        for seat in range(4):
            changed = any(
                not torch.equal(before[name][seat], each[seat])
                for name, each in env._weights.items()
            )
            assert not (changed and playing[seat])
            seats_of_newest += changed
        before = {name: each.clone() for name, each in env._weights.items()}
    assert seats_of_newest >= 2
    assert sum(pool.results()) + sum(
        sum(each) for (agent, _), each in pool.games.items() if agent != "agent"
    ) == int(env.games().sum())


def test_shares_decide_how_often_a_seat_is_drawn() -> None:
    env, pool = made(4_000, scripted={"weak": 0.25})
    env.reset(seed=3)
    shares = env.players() / 4_000
    torch.testing.assert_close(shares[:4], torch.full((4,), 0.75 / 4), atol=0.03, rtol=0)
    pool.set_mix({"strong": 1.0})
    env.reset(seed=4)
    assert env.players().tolist() == [0, 0, 0, 0, 0, 4_000, 0]


@pytest.mark.slow
def test_a_restored_pool_continues_bit_for_bit() -> None:
    env, pool = made(16, scripted={"weak": 0.2}, sampling="hard")
    env.reset(seed=2)
    for t in range(4):
        pool.add(agent_of(t + 1).greedy(), t + 1)
        for step in range(25):
            env.step(actions_of(env.position.n_steps, 25 * t + step))
        pool.between_iterations()
    other_env, other = made(16, scripted={"weak": 0.2}, sampling="hard")
    other.load_state_dict(pool.state_dict())
    other_env.load_state_dict(env.state_dict())

    for t in range(30):
        actions = actions_of(env.position.n_steps, t)
        for one, two in zip(env.step(actions)[:4], other_env.step(actions)[:4], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
        if t % 10 == 0:
            pool.between_iterations()
            other.between_iterations()
    assert pool.games == other.games
    torch.testing.assert_close(env._chances, other_env._chances, rtol=0, atol=0)


def test_a_task_for_one_player_is_refused() -> None:
    _, pool = made(1)
    with pytest.raises(ValueError, match="not the space of two equal players"):
        TensorSelfPlay(TorchCartPole(2), pool)


@pytest.mark.slow  # tracing takes 10 s
def test_a_step_with_opponents_compiles_to_one_graph_that_sees_new_weights() -> None:
    env, pool = made(16, scripted={"weak": 0.3})
    pool.add(agent_of(1).greedy(), 5)
    env.reset(seed=1)

    def step(parts: list[torch.Tensor], action: torch.Tensor) -> list[torch.Tensor]:
        position, result = env.transition(join_position(parts), action)
        return [*position_parts(position), result.obs, result.reward]

    compiled: Any = torch.compile(step, backend="aot_eager", fullgraph=True)
    parts, actions = position_parts(env.position), actions_of(env.position.n_steps, 0)
    with torch.no_grad():
        before = compiled(parts, actions)
        torch.testing.assert_close(before, step(parts, actions))
        for seat in range(4):
            env.sit_down(seat, pool.selves[-1])
        after = compiled(parts, actions)
        torch.testing.assert_close(after, step(parts, actions))
    assert not torch.equal(before[6], after[6])  # x of the opponent


def test_games_before_a_reset_are_not_subtracted_from_those_after_it() -> None:
    env, pool = made(8)
    env.reset(seed=1)
    action = torch.zeros((8, *(env.single_action_space.shape or ())))
    for _ in range(90):  # a game has 80 steps
        env.step(action)
    pool.between_iterations()
    before = {pair: list(results) for pair, results in pool.games.items()}
    assert sum(pool.results()) >= 8

    env.reset(seed=2)
    pool.between_iterations()

    assert pool.games == before
