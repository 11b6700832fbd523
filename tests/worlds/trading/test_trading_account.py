"""The arithmetic of trading accounts, by numbers that can be done by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ml_pipeline.worlds.trading.account import (
    ARRAYS,
    FLOATS,
    NO_FILL,
    Account,
    AccountRules,
    Bar,
    fill,
    mark,
    open_account,
    view,
)
from ml_pipeline.worlds.trading.rewards import RewardRules, reward

FREE: dict[str, Any] = {"commission": 0.0, "maintenance_margin": 0.0, "cash": 1_000.0}


def bar(price: float, close: float | None = None, **changes: Any) -> Bar:
    close = price if close is None else close
    plain = Bar(price, max(price, close), min(price, close), close, 0.0, True)
    return plain._replace(**changes)


def step(rules: AccountRules, account: Account, target: float, at: Bar) -> Account:
    account, _ = fill(FLOATS, rules, account, target, at)
    account, _ = mark(FLOATS, rules, account, at)
    return account


def new(rules: AccountRules) -> Account:
    return open_account(rules, 0.0, 0.0)


@pytest.mark.parametrize(
    ("target", "units", "cash", "equity", "drawdown"),
    [(1.0, 100.0, 0.0, 1_100.0, 0.0), (-1.0, -100.0, 2_000.0, 900.0, 0.1)],
)
def test_a_position_gains_what_the_price_gains_between_fill_and_close(
    target: float, units: float, cash: float, equity: float, drawdown: float
) -> None:
    rules = AccountRules(**FREE)

    account = step(rules, new(rules), target, bar(10.0, 11.0))

    assert (account.units, account.cash, account.equity) == (units, cash, equity)
    assert account.value == units * 11.0
    assert account.drawdown == pytest.approx(drawdown)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_trade_pays_slippage_half_the_spread_and_commission(side: float) -> None:
    rules = AccountRules(**{**FREE, "commission": 0.01, "slippage": 0.02})

    account, filled = fill(FLOATS, rules, new(rules), 0.5 * side, bar(10.0, spread=0.4))

    assert filled.price == pytest.approx(10.0 + side * (0.2 + 0.2))
    assert filled.units == account.units
    assert filled.units * side > 0.0
    assert account.cash == pytest.approx(1_000.0 - filled.units * filled.price * (1 + 0.01 * side))
    assert account.costs == pytest.approx(abs(filled.units) * (0.4 + 0.01 * filled.price))


@pytest.mark.parametrize("target", [1.0, 0.3, -0.3, -1.0, 2.0])
def test_exposure_after_the_costs_is_exactly_the_target(target: float) -> None:
    rules = AccountRules(**{**FREE, "commission": 0.01, "slippage": 0.02, "leverage": 2.0})

    account, _ = fill(FLOATS, rules, new(rules), target, bar(10.0, spread=0.4))

    equity = account.cash + account.units * 10.0
    assert equity == pytest.approx(1_000.0 - account.costs)
    assert account.units * 10.0 / equity == pytest.approx(target)


def test_closing_a_position_leaves_no_units() -> None:
    rules = AccountRules(**{**FREE, "commission": 0.001})
    account = step(rules, new(rules), 0.7, bar(3.0, 3.1))

    account = step(rules, account, 0.0, bar(3.1))

    assert account.units == account.entry == account.value == account.bars == 0.0
    assert account.n_trades == 2.0


def test_trades_below_the_minimum_are_left_out_unless_they_close() -> None:
    rules = AccountRules(**FREE, min_trade=0.1)
    account, _ = fill(FLOATS, rules, new(rules), 0.15, bar(10.0))

    same, filled = fill(FLOATS, rules, account, 0.2, bar(10.0))
    closed, _ = fill(FLOATS, rules, account._replace(units=1e-6), 0.0, bar(10.0))

    assert same == account
    assert filled == NO_FILL
    assert closed.units == 0.0


def test_nothing_trades_where_the_bar_is_not_tradable() -> None:
    rules = AccountRules(**FREE)

    account, filled = fill(FLOATS, rules, new(rules), 1.0, bar(10.0, tradable=False))

    assert account.units == 0.0
    assert filled == NO_FILL


def test_entry_price_is_the_average_of_what_was_bought() -> None:
    rules = AccountRules(**{**FREE, "cash": 1_200.0, "leverage": 2.0})
    account, _ = fill(FLOATS, rules, new(rules), 0.5, bar(10.0))  # 60 units at 10
    account, _ = fill(FLOATS, rules, account, 1.0, bar(20.0))  # equity 1800: 30 more at 20

    assert account.units == 90.0
    assert account.entry == pytest.approx((60 * 10 + 30 * 20) / 90)
    smaller, _ = fill(FLOATS, rules, account, 0.5, bar(20.0))
    assert smaller.entry == account.entry
    turned, _ = fill(FLOATS, rules, account, -0.5, bar(20.0))
    assert turned.entry == 20.0


def test_age_counts_the_bars_of_a_position_and_restarts_when_it_turns() -> None:
    rules = AccountRules(**FREE)
    account, ages = new(rules), []

    for target in (1.0, 1.0, -1.0, -1.0, 0.0):
        account = step(rules, account, target, bar(10.0))
        ages.append(account.bars)

    assert ages == [1.0, 2.0, 1.0, 2.0, 0.0]


def test_longs_pay_funding_and_shorts_receive_it() -> None:
    rules = AccountRules(**FREE, funding=0.01)

    long = step(rules, new(rules), 1.0, bar(10.0))
    short = step(rules, new(rules), -1.0, bar(10.0))

    assert (long.equity, long.financing) == (990.0, 10.0)
    assert (short.equity, short.financing) == (1_010.0, -10.0)


def test_borrowed_money_and_borrowed_units_cost_interest() -> None:
    rules = AccountRules(**FREE, borrowing=0.01, leverage=3.0)

    long = step(rules, new(rules), 3.0, bar(10.0))
    short = step(rules, new(rules), -1.0, bar(10.0))

    assert long.financing == pytest.approx(0.01 * 2_000.0)
    assert short.financing == pytest.approx(0.01 * 1_000.0)


@pytest.mark.parametrize(
    ("target", "worst", "equity"),
    [
        (4.0, {"low": 8.3}, 320.0),  # 400 units, cash -3000; 0.1 * 3320 = 332 would be needed
        (4.0, {"low": 8.34}, None),  # 336 > 333.6
        (-4.0, {"high": 11.5}, 400.0),  # -400 units, cash 5000; 0.1 * 4600 = 460 would be needed
        (-4.0, {"high": 11.3}, None),  # 480 > 452
    ],
)
def test_a_margin_call_closes_at_the_worst_price_of_the_bar(
    target: float, worst: dict[str, float], equity: float | None
) -> None:
    rules = AccountRules(**{**FREE, "leverage": 4.0, "maintenance_margin": 0.1})
    account, _ = fill(FLOATS, rules, new(rules), target, bar(10.0))

    account, forced = mark(FLOATS, rules, account, bar(10.0, **worst))

    assert account.is_closed == (equity is not None)
    if equity is None:
        assert (account.equity, forced) == (1_000.0, NO_FILL)
    else:
        assert (account.units, account.equity) == (0.0, pytest.approx(equity))
        assert account.cash == account.equity
        assert (forced.units, forced.price) == (-100.0 * target, *worst.values())


def test_the_drawdown_stop_closes_at_the_close_with_costs() -> None:
    rules = AccountRules(**{**FREE, "commission": 0.01, "max_drawdown": 0.2})
    account, _ = fill(FLOATS, rules, new(rules), 0.5, bar(10.0))

    account, forced = mark(FLOATS, rules, account, bar(10.0, 5.0))

    assert account.is_closed
    assert forced.price == 5.0
    assert account.equity == pytest.approx(account.cash)
    assert account.costs > 0.01 * 500.0 * 0.9


def test_an_insolvent_account_is_closed_and_never_trades() -> None:
    rules = AccountRules(**FREE, leverage=2.0)
    account, _ = fill(FLOATS, rules, new(rules), 2.0, bar(10.0))

    same, filled = fill(FLOATS, rules, account, 1.0, bar(4.0))  # equity -200 at the open
    account, _ = mark(FLOATS, rules, same, bar(4.0))

    assert filled == NO_FILL
    assert account.is_closed
    assert account.equity == pytest.approx(-200.0)
    assert all(math.isfinite(number) for number in view(FLOATS, rules, account))


def test_targets_of_a_portfolio_fit_beside_positions_that_cannot_trade() -> None:
    rules = AccountRules(**FREE)
    account = open_account(rules, np.zeros(2), 0.0)
    price = np.array([10.0, 20.0])
    at = Bar(price, price, price, price, 0.0 * price, np.array([True, True]))
    account, _ = fill(ARRAYS, rules, account, np.array([0.8, 0.2]), at)

    at = at._replace(tradable=np.array([False, True]))
    account, _ = fill(ARRAYS, rules, account, np.array([0.0, 1.0]), at)

    np.testing.assert_allclose(account.units * price, [800.0, 200.0])


def test_a_portfolio_of_one_asset_equals_a_single_asset() -> None:
    rules = AccountRules(commission=0.001, slippage=0.001, funding=0.001, borrowing=0.002)
    many, one = open_account(rules, np.zeros(1), 0.0), new(rules)
    random = np.random.default_rng(0)

    for _ in range(50):
        at = bar(10.0 * random.uniform(0.9, 1.1), 10.0 * random.uniform(0.9, 1.1), spread=0.01)
        target = float(random.choice([-1.0, 0.0, 0.5, 1.0]))
        array_bar = Bar(*(np.array([value]) for value in at))
        one = step(rules, one, target, at)
        many, _ = fill(ARRAYS, rules, many, np.array([target]), array_bar)
        many, _ = mark(ARRAYS, rules, many, array_bar)
        np.testing.assert_allclose(np.hstack(many), one, rtol=1e-12, atol=1e-9)


def test_log_return_and_its_floor() -> None:
    account = new(AccountRules(cash=100.0))
    rules = RewardRules()

    gain, _ = reward(FLOATS, rules, account, account._replace(equity=110.0), (0.0, 0.0))
    ruin, _ = reward(FLOATS, rules, account, account._replace(equity=-50.0), (0.0, 0.0))

    assert gain == pytest.approx(math.log(1.1))
    assert ruin == pytest.approx(math.log(1e-3))


def test_differential_sharpe_is_the_change_of_the_running_sharpe_ratio() -> None:
    """Moody & Saffell: the derivative of the ratio with respect to the rate, at rate 0."""
    before = new(AccountRules(cash=100.0))
    after = before._replace(equity=101.0)
    moments = (0.002, 0.0001)

    gain, (mean, square) = reward(
        FLOATS, RewardRules("differential_sharpe", sharpe_rate=0.1), before, after, moments
    )

    assert (mean, square) == pytest.approx((0.002 + 0.1 * 0.008, 0.0001 + 0.1 * 0.0))
    sharpe = [
        (0.002 + rate * (0.01 - 0.002))
        / math.sqrt(0.0001 + rate * (0.01**2 - 0.0001) - (0.002 + rate * (0.01 - 0.002)) ** 2)
        for rate in (-1e-6, 1e-6)
    ]
    assert gain == pytest.approx((sharpe[1] - sharpe[0]) / 2e-6, rel=1e-6)


def test_risk_adjusted_reward_subtracts_each_penalty() -> None:
    before = new(AccountRules(cash=100.0))
    after = before._replace(equity=90.0, turnover=2.0)
    rules = RewardRules(
        "risk_adjusted", variance_penalty=3.0, drawdown_penalty=0.5, turnover_penalty=0.01
    )

    gain, _ = reward(FLOATS, rules, before, after, (0.0, 0.0))

    fall = math.log(0.9)
    assert gain == pytest.approx(fall - 3.0 * fall**2 - 0.5 * 0.1 - 0.01 * 2.0)
