"""Trading: the order of events in a step, episodes, snapshots, and that it never looks ahead."""

from __future__ import annotations

import pickle
from dataclasses import fields
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from trading_markets import COSTS, FREE, OPTIONS, changed_after, flat_market, random_market

from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot, why_no_snapshot
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.errors import UserError
from ml_pipeline.shelves import preset_files
from ml_pipeline.worlds.trading.account import AccountRules, fill, mark
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.env import BLOCK, Trading
from ml_pipeline.worlds.trading.rewards import RewardRules
from ml_pipeline.worlds.trading.task import TradingSettings, bar_of

each_option = pytest.mark.parametrize("name", OPTIONS)


def make(market: Market, **settings: Any) -> Trading:
    return Trading(**{"market": market, "episode_bars": 20, **settings})


def actions_of(env: gym.Env[Any, Any], n: int, *, seed: int = 0) -> list[Any]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(n)]


def play(env: Trading, actions: list[Any], **options: Any) -> list[Any]:
    """Row, observation, reward, ends, info, account and fills of each step of one episode."""
    obs, info = env.reset(seed=3, options=options)
    steps: list[Any] = [(env.row, obs, info)]
    for action in actions:
        result = env.step(action)
        steps.append((env.row, *result, env.account, env.fill, env.forced))
        if result[2] or result[3]:
            break
    return steps


def as_bytes(step: Any) -> bytes:
    return pickle.dumps([np.asarray(part).tolist() for part in _flat(step)])


def _flat(part: Any) -> list[Any]:
    if isinstance(part, dict):
        part = tuple(part.items())
    if isinstance(part, tuple):
        return [leaf for each in part for leaf in _flat(each)]
    return [part]


def test_an_order_fills_at_the_next_open_and_is_marked_at_the_next_close() -> None:
    market = flat_market([11.0, 22.0, 33.0, 44.0], open_prices=[10.0, 20.0, 30.0, 40.0])
    env = make(market, episode_bars=2, account={**FREE, "cash": 1_000.0})
    env.reset(options={"row": 0})

    obs, gain, terminated, truncated, info = env.step(2)

    assert env.fill.price == 20.0
    assert env.account.units == 50.0
    assert env.account.equity == 50.0 * 22.0
    assert gain == pytest.approx(np.log(1.1))
    assert obs[0] == 22.0
    assert (terminated, truncated) == (False, False)
    assert info == {}


def test_the_last_info_of_an_episode_has_what_a_run_logs() -> None:
    env = make(flat_market([10.0, 11.0, 12.0]), episode_bars=2, account={**FREE, "cash": 100.0})
    env.reset(seed=0)
    env.step(2)

    *_, truncated, info = env.step(0)

    assert truncated
    assert info == {
        "equity": pytest.approx(110.0 - 10.0),
        "total_return": pytest.approx(0.0),
        "max_drawdown": pytest.approx(1.0 - 100.0 / 110.0),
        "trades": 2.0,
        "turnover": pytest.approx(3.0),
        "costs": 0.0,
        "financing": 0.0,
        "closed": False,
    }
    assert all(isinstance(number, (float, bool)) for number in info.values())


def test_the_observation_has_a_window_of_features_and_the_account() -> None:
    market = random_market()
    env = make(market, window=3, symbol="S1", account=FREE)
    env.reset(seed=0, options={"row": 10})
    while env.fill.units == 0.0:  # until a bar is tradable
        obs, *_ = env.step(2)

    row, account = env.row, env.account
    np.testing.assert_array_equal(obs[:6], market.feature[row - 2 : row + 1, 1].ravel())
    profit = account.units * (market.close[row, 1] - env.fill.price) / account.equity
    np.testing.assert_allclose(obs[6:8], [account.value / account.equity, profit], rtol=1e-5)
    np.testing.assert_allclose(obs[8:], [np.log(2.0) / 10, 1 - account.equity / account.peak])


def test_the_observation_of_a_portfolio_has_the_features_of_every_symbol() -> None:
    market = random_market()
    env = make(market, window=2, portfolio=True, positions=None)

    obs, _ = env.reset(seed=0)

    rows = market.feature[env.row - 1 : env.row + 1]
    np.testing.assert_array_equal(obs[:12], rows.ravel())
    assert obs[12:].tolist() == [0.0] * 10
    assert env.observation_space.contains(obs)


@each_option
def test_the_parts_of_a_step_give_the_same_away_from_the_env(name: str) -> None:
    """As a live account uses them: target, fill, mark and observation, one bar at a time."""
    market = random_market(volatility=0.002)
    env = make(market, **OPTIONS[name])
    task, window = env.task, env.task.window
    env.reset(seed=4)
    account = task.new_account()

    for action in actions_of(env, 20):
        obs, *_ = env.step(action)
        row = slice(env.row, env.row + 1)
        columns = task.bars(row.start, row.stop, env.column)[0]
        bar = bar_of(columns if task.portfolio else columns.tolist())
        account, _ = fill(task.m, task.rules, account, task.target(action), bar)
        account, _ = mark(task.m, task.rules, account, bar)
        features = market.feature[env.row + 1 - window : env.row + 1, env.column]
        assert as_bytes(account) == as_bytes(env.account)
        np.testing.assert_array_equal(task.observation(features, account), obs)
        if account.is_closed:
            break


@each_option
def test_nothing_depends_on_bars_after_the_current_one(name: str) -> None:
    market = random_market(seed=5, volatility=0.01)
    settings = OPTIONS[name]
    first = make(market, **settings)
    actions = actions_of(first, 60)
    wanted = play(first, actions)
    cuts = [wanted[i][0] for i in (0, 1, len(wanted) // 2, len(wanted) - 2)]

    for cut in cuts:
        found = play(make(changed_after(market, cut), **settings), actions)
        seen = [as_bytes(step) for step in found if step[0] <= cut]
        assert seen == [as_bytes(step) for step in wanted if step[0] <= cut]
        assert as_bytes(found[len(seen)]) != as_bytes(wanted[len(seen)])  # the change matters


@each_option
def test_an_episode_continues_from_its_snapshot(name: str) -> None:
    make_env = partial(make, random_market(volatility=0.002), **OPTIONS[name])
    assert why_no_snapshot(make_env(), make_env) is None

    env = make_env()
    actions = actions_of(env, 8)
    obs, _ = env.reset(seed=1)
    for action in actions[:4]:
        obs, *_ = env.step(action)
    snapshot = take_snapshot(env, obs)
    other, _ = restore_snapshot(make_env(), snapshot)

    assert len(snapshot) < 3_000  # no part of the market
    for action in actions[4:]:
        assert as_bytes(other.step(action)) == as_bytes(env.step(action))
    assert as_bytes(other.reset()) == as_bytes(env.reset())  # and its random generator


def test_episodes_start_at_random_rows_and_symbols_of_the_seed() -> None:
    env = make(random_market())
    starts = set()
    for seed in range(200):
        env.reset(seed=seed)
        starts.add((env.row, env.column))
        again = (env.row, env.column)
        env.reset(seed=seed)
        assert again == (env.row, env.column)

    rows, columns = zip(*starts, strict=True)
    assert set(columns) == {0, 1, 2}
    assert (min(rows), max(rows)) == (0, 60 - 1 - 20)


def test_a_whole_period_runs_from_its_first_window_to_its_last_bar() -> None:
    n_rows = 2 * BLOCK + 10
    market = random_market(n_rows, volatility=0.001)
    env = make(market, window=4, random_start=False, symbol="S2")
    obs, _ = env.reset(seed=9)
    n_steps, truncated = 0, False
    np.testing.assert_array_equal(obs[:8], market.feature[:4, 2].ravel())

    while not truncated:
        obs, _, _, truncated, _ = env.step(1)
        n_steps += 1
        np.testing.assert_array_equal(obs[6:8], market.feature[3 + n_steps, 2])

    assert n_steps == n_rows - 4
    assert env.row == n_rows - 1


def test_a_closed_account_ends_the_episode_and_cannot_be_stepped() -> None:
    market = flat_market([10.0, 10.0, 4.0, 10.0, 10.0])
    env = make(market, episode_bars=4, account={**FREE, "leverage": 2.0})
    env.reset(options={"row": 0})
    env.step(2)

    obs, gain, terminated, truncated, info = env.step(2)

    assert (terminated, truncated) == (True, False)
    assert info["closed"] is True
    assert info["equity"] == pytest.approx(-2_000.0)  # 2,000 units fell by 6
    assert gain == pytest.approx(np.log(1e-3))
    assert np.isfinite(obs).all()
    with pytest.raises(gym.error.ResetNeeded):
        env.step(1)


def test_each_env_of_a_vector_env_can_have_its_own_symbol() -> None:
    make_env = partial(make, random_market(), symbol="each")
    envs = SerialEnv([make_env] * 4, seed=6)
    envs.reset()
    first = envs.call("column")
    for _ in range(25):  # into the next episode
        envs.step(np.zeros(4, dtype=np.int64))

    assert first == envs.call("column") == (0, 1, 2, 0)

    envs.set_attr("symbol", ["S2", "S2", "S1", "random"])
    envs.reset()
    assert envs.call("column")[:3] == (2, 2, 1)


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_give_the_trajectories_of_one_process(start_method: Any) -> None:
    make_env = partial(make, random_market(volatility=0.002), account=COSTS)
    serial = SerialEnv([make_env] * 4, seed=5)
    parallel = ParallelEnv([make_env] * 4, seed=5, n_workers=2, start_method=start_method)
    actions = [serial.action_space.sample() for _ in range(50)]
    try:
        np.testing.assert_array_equal(serial.reset()[0], parallel.reset()[0])
        for action in actions:
            ours, theirs = parallel.step(action), serial.step(action)
            for a, b in zip(ours[:4], theirs[:4], strict=True):
                np.testing.assert_array_equal(a, b)
    finally:
        parallel.close()


def test_actions_outside_the_bounds_are_clipped_and_portfolios_fit_the_leverage() -> None:
    one = make(flat_market([10.0] * 5), episode_bars=3, positions=None, account=FREE)
    one.reset(seed=0)
    one.step(np.array([7.0], dtype=np.float32))
    assert one.account.value == pytest.approx(one.account.equity)

    market = random_market()._replace(tradable=np.ones((60, 3), dtype=bool))
    account = {**FREE, "leverage": 2.0}
    many = make(market, portfolio=True, account=account)
    many.reset(seed=0)
    many.step(np.array([2, 2, 0]))  # long, long, short
    exposure = many.account.units * market.open[many.row] / 10_000.0
    np.testing.assert_allclose(exposure, [2 / 3, 2 / 3, -2 / 3])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"windows": 3}, "windows=3: unknown; choose from data, period, market"),
        ({"account": {"fee": 1}}, "account.fee=1: unknown; choose from cash, leverage"),
        ({"account": {"least_share": 0.5}}, "account.least_share=0.5: unknown"),
        ({"account": {"cash": 0.0}}, "account.cash=0.0: is not above 0"),
        ({"account": {"commission": -0.1}}, "account.commission=-0.1: is a share"),
        (
            {"account": {"leverage": 5.0, "maintenance_margin": 0.2}},
            "account.maintenance_margin=0.2: .* 1 / leverage",
        ),
        ({"account": {"max_drawdown": 1.5}}, "account.max_drawdown=1.5"),
        ({"reward": {"kind": "profit"}}, "reward.kind=profit: unknown; choose from log_return"),
        ({"reward": {"sharpe_rate": 0.0}}, "reward.sharpe_rate=0.0"),
        (
            {"reward": {"turnover_penalty": 1.0}},
            "reward.turnover_penalty=1.0: reward.kind=log_return has no",
        ),
        ({"window": 0}, "window=0: must be at least 1"),
        ({"episode_bars": 100}, "episode_bars=100: the period train has 60 bars"),
        ({"symbol": "XYZ"}, "symbol=XYZ: not in the market; choose random, each or one of S0"),
        ({"symbol": "S0", "portfolio": True}, "symbol=S0: a portfolio holds every symbol"),
        ({"positions": [0.0]}, "name at least two"),
        ({"positions": [0.0, 2.0]}, "each from -1 to 1"),
        ({"account": {"shorts": False}}, "remove those below 0"),
        ({"data": {"market": "edge"}}, "give either data"),
        ({"market": None}, "give either data"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make(**{"market": random_market(), **settings})


def test_prices_without_meaning_are_refused() -> None:
    market = random_market()
    market.close[7, 2] = np.nan
    with pytest.raises(ValueError, match=r"market.close\[7\] of S2 is nan"):
        make(market)

    market = random_market()
    market.spread[:] = 1_000.0
    with pytest.raises(ValueError, match="the market has a spread below 0 or above twice"):
        make(market)


def test_reset_refuses_rows_outside_the_period_and_unknown_options() -> None:
    env = make(random_market())
    with pytest.raises(ValueError, match="row=50: an episode starts from row 0 to 39"):
        env.reset(options={"row": 50})
    with pytest.raises(ValueError, match="options row and symbol, got start"):
        env.reset(options={"start": 5})


def test_the_factory_names_the_key_of_a_wrong_setting() -> None:
    target = "ml_pipeline.worlds.trading.env.Trading"
    factory = EnvFactory(None, target, kwargs={"market": random_market(), "episode_bars": 10**6})
    with pytest.raises(UserError, match="episode_bars=1000000: the period train has 60 bars"):
        factory()


def test_the_preset_spells_out_the_defaults() -> None:
    preset = yaml.safe_load(preset_files("env")["trading"].read_text())["kwargs"]

    for kind, given in (
        (AccountRules, preset.pop("account")),
        (RewardRules, preset.pop("reward")),
        (TradingSettings, preset),
    ):
        defaults = {each.name: each.default for each in fields(kind) if each.init}
        for name in set(defaults) - set(given):
            assert name in ("data", "market", "account", "reward")
        for name, value in given.items():
            wanted = defaults[name]
            assert value == (list(wanted) if isinstance(wanted, tuple) else wanted)
