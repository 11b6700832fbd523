"""OpponentPool: who plays, how past selves act together, and what a resume keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from two_player_games import PULLS, Puller

from ml_pipeline.algorithms.dqn.agent import DQNAgent
from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.sac.agent import SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.self_play import ArrayOpponents
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext

OBS = spaces.Box(-4.0, 4.0, (2,), np.float32)


def agent_of(seed: int, *, discrete: bool = False) -> Any:
    context = RunContext.alone(seed=seed)
    if discrete:
        return DQNAgent(Spaces(OBS, spaces.Discrete(3)), MLP, DQNConfig(), context)
    box = spaces.Box(0.0, 1.0, (1,), np.float32)
    return SACAgent(Spaces(OBS, box), MLP, SACConfig(normalize_obs=True), context)


def pool_of(n_selves: int, *, discrete: bool = False, **settings: Any) -> OpponentPool:
    agents = [agent_of(seed, discrete=discrete).greedy() for seed in range(n_selves)]
    players = {"weak": Puller(0.3), "strong": Puller(1.0)}
    pool = OpponentPool(agents[0], OpponentConfig(**settings), players, seed=1)
    for number, greedy in enumerate(agents):
        pool.add(greedy, 100 * number)
    return pool


def drawn(pool: OpponentPool, n: int) -> list[str]:
    pool.choose(range(n))
    return [who["name"] for who in _seats(pool)]


def _seats(pool: OpponentPool) -> list[dict[str, Any]]:
    state = pool.state_dict()
    return [
        {"name": who if isinstance(who, str) else state["selves"][who]["name"]}
        for _, who in state["playing"]
    ]


@pytest.mark.parametrize("discrete", [False, True])
def test_past_selves_and_scripted_players_act_together_as_each_would_alone(discrete: bool) -> None:
    pool = pool_of(5, discrete=discrete, scripted={"weak": 0.3})
    names = drawn(pool, 40)
    obs = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)

    moves = PULLS if discrete else None
    actions = ArrayOpponents(pool, moves=moves).act(range(40), obs)

    alone = {f"self at {100 * seed}": agent_of(seed, discrete=discrete) for seed in range(5)}
    assert set(names) == {*alone, "weak"}
    for row, name in enumerate(names):
        if name == "weak":
            expected = np.array([0.3], dtype=np.float32)
        else:
            expected = alone[name].act_batch(obs[row : row + 1], True)[0]
            expected = PULLS[expected] if discrete else expected
        np.testing.assert_allclose(actions[row], expected, atol=1e-6)


def test_a_pool_with_one_past_self_acts_like_it() -> None:
    pool = pool_of(1)
    pool.choose(range(3))
    obs = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    expected = agent_of(0).act_batch(obs, True)
    actions = ArrayOpponents(pool).act(range(3), obs)
    np.testing.assert_allclose(actions, expected, atol=1e-6)


def test_the_oldest_leaves_a_full_pool_and_finishes_its_games() -> None:
    pool = pool_of(3, capacity=3, sampling="latest")
    names = drawn(pool, 2)
    assert names == ["self at 200"] * 2
    opponents, obs = ArrayOpponents(pool), np.ones((2, 2), np.float32)
    before = opponents.act(range(2), obs)
    for number in (3, 4, 5):
        pool.add(agent_of(number).greedy(), 100 * number)

    assert [each.name for each in pool.selves] == ["self at 300", "self at 400", "self at 500"]
    np.testing.assert_array_equal(opponents.act(range(2), obs), before)
    pool.record(0, 1)
    pool.choose([0])
    assert [each["name"] for each in _seats(pool)] == ["self at 500", "self at 200"]


def share_of(pool: OpponentPool, name: str) -> float:
    return drawn(pool, 2_000).count(name) / 2_000


def with_scores(sampling: str, power: float = 2.0) -> OpponentPool:
    """The agent beats the first past self in 88 of 98 games and loses as often to the second."""
    pool = pool_of(2, sampling=sampling, power=power)
    pool.selves[0].results = [88.0, 0.0, 10.0]  # with two drawn games: 0.89
    pool.selves[1].results = [10.0, 0.0, 88.0]  # 0.11
    return pool


@pytest.mark.parametrize(
    ("sampling", "power", "expected"),
    [
        ("latest", 1.0, 1.0),
        ("uniform", 1.0, 0.5),
        ("hard", 1.0, 0.89),
        ("hard", 2.0, 0.89**2 / (0.89**2 + 0.11**2)),
        ("even", 1.0, 0.5),
    ],
)
def test_past_selves_play_as_often_as_the_sampling_says(
    sampling: str, power: float, expected: float
) -> None:
    share = share_of(with_scores(sampling, power), "self at 100")
    assert share == pytest.approx(expected, abs=0.04)


def test_scripted_players_have_their_shares_and_a_new_mix_changes_them() -> None:
    pool = pool_of(1, scripted={"weak": 0.25, "strong": 0.5})
    assert share_of(pool, "strong") == pytest.approx(0.5, abs=0.04)
    assert share_of(pool, "weak") == pytest.approx(0.25, abs=0.04)

    pool.set_mix({"strong": 1.0})
    assert share_of(pool, "strong") == 1.0
    with pytest.raises(ValueError, match="'wek': this env has no such player, only weak, strong"):
        pool.set_mix({"wek": 0.5})
    with pytest.raises(ValueError, match="sum of at most 1"):
        pool.set_mix({"weak": 0.7, "strong": 0.7})


def test_results_belong_to_the_copy_that_joins() -> None:
    pool = pool_of(1)
    pool.choose([0, 1])
    for winner in (1, 1, 0, -1):
        pool.record(0, winner)
    assert pool.results() == (2, 1, 1)
    assert pool.selves[0].score == (2 + 0.5 + 1) / (4 + 2)

    pool.add(agent_of(1).greedy(), 100)
    assert pool.results() == (0, 0, 0)
    assert pool.games == {("self at 100", "self at 0"): [2, 1, 1]}


def test_old_results_fade() -> None:
    pool = pool_of(1)
    pool.choose([0])
    for _ in range(200):
        pool.record(0, -1)
    for _ in range(100):
        pool.record(0, 1)
    assert pool.selves[0].score > 0.49  # 100 of 300 games were won


def test_a_restored_pool_continues_bit_for_bit() -> None:
    pool = pool_of(4, capacity=2, sampling="hard", scripted={"weak": 0.3})
    pool.choose(range(8))
    pool.add(agent_of(9).greedy(), 900)
    pool.record(3, 1)
    other = pool_of(1, capacity=2, sampling="hard", scripted={"weak": 0.3})
    obs = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    opponents = ArrayOpponents(other)
    other.choose(range(8))
    opponents.act(range(8), obs)  # what it has arranged for these members must not stay

    other.load_state_dict(pool.state_dict())

    expected = ArrayOpponents(pool).act(range(8), obs)
    np.testing.assert_array_equal(opponents.act(range(8), obs), expected)
    assert drawn(pool, 50) == drawn(other, 50)
    assert pool.games == other.games


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "best"}, "opponent.sampling"),
        ({"capacity": 0}, "opponent.capacity"),
        ({"power": 0.0}, "opponent.power"),
        ({"add_at_score": 1.5}, "opponent.add_at_score"),
        ({"scripted": {"weak": 2.0}}, "opponent.scripted.weak"),
        ({"scripted": {"weak": 0.6, "strong": 0.6}}, "sum of at most 1"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpponentConfig(**settings)
