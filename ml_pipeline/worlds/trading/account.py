"""The arithmetic of a trading account: ``fill`` an order at a bar's open, ``mark`` it at the close.

Every function takes ``m``, its mathematics: ``FLOATS`` for one asset as Python floats, ``ARRAYS``
for several assets as NumPy arrays [A], or that of the tensor env. So Trading, TorchTrading and a
live account follow the same rules. All numbers are float64.

The prices of a bar are mid prices. A buyer pays open * (1 + slippage) + spread / 2, a seller gets
open * (1 - slippage) - spread / 2. The commission is a share of the value at this price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Settings = TypeVar("Settings")
Number = Any  # a float, an array [A] or a tensor [N, A]: what ``m`` computes with


class Account(NamedTuple):
    """An account after the last close. "Per asset" fields are [A]; the others are one number."""

    cash: Number  # negative: borrowed
    units: Number  # per asset; negative: short
    entry: Number  # per asset: average price of the position, 0 without one
    value: Number  # per asset: units * close; cash + sum(value) == equity
    bars: Number  # per asset: since the position was opened
    equity: Number
    peak: Number  # highest equity so far
    drawdown: Number  # largest so far, as a share of the peak
    turnover: Number  # traded value so far, in multiples of the equity at each trade
    n_trades: Number
    costs: Number  # commission, spread and slippage so far
    financing: Number  # funding and interest so far; negative: received
    is_closed: Number  # a margin call or the drawdown stop closed it


class Bar(NamedTuple):
    """One bar of the assets of an account, each field per asset."""

    open: Number
    high: Number
    low: Number
    close: Number
    spread: Number  # in units of price
    tradable: Number  # bool


class Fill(NamedTuple):
    """Trades at one moment of a bar, per asset; ``units`` is 0 where there was none."""

    units: Number
    price: Number  # with spread and slippage
    cost: Number  # spread, slippage and commission, in money

    def trades(self, symbols: Sequence[str]) -> Iterator[tuple[str, float, float, float]]:
        """Symbol, units, price and cost of each trade."""
        columns = (np.broadcast_to(each, len(symbols)).tolist() for each in self)
        for symbol, units, price, cost in zip(symbols, *columns, strict=True):
            if units != 0.0:
                yield symbol, units, price, cost


NO_FILL = Fill(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class AccountRules:
    """Costs and limits of an account; conf/env/trading.yaml explains the keys."""

    cash: float = 10_000.0
    leverage: float = 1.0
    shorts: bool = True
    commission: float = 0.0005
    spread: float | None = None
    slippage: float = 0.0
    funding: float = 0.0
    borrowing: float = 0.0
    maintenance_margin: float = 0.05
    max_drawdown: float | None = None
    min_trade: float = 0.01
    least_share: float = field(init=False)  # of the highest equity; with less it is closed

    def __post_init__(self) -> None:
        _check(self.cash > 0.0, "cash", self.cash, "is not above 0")
        _check(self.leverage > 0.0, "leverage", self.leverage, "is not above 0")
        for name in ("commission", "slippage", "min_trade"):
            value = getattr(self, name)
            _check(0.0 <= value < 0.5, name, value, "is a share from 0 to below 0.5")
        _check(self.spread is None or 0.0 <= self.spread < 0.5, "spread", self.spread, "is a share")
        for name in ("funding", "borrowing"):
            value = getattr(self, name)
            _check(abs(value) < 0.5, name, value, "is a share per bar, below 0.5")
        _check(self.borrowing >= 0.0, "borrowing", self.borrowing, "is negative")
        margin, limit = self.maintenance_margin, 1.0 / self.leverage
        fact = f"must be from 0 to below 1 / leverage = {limit:g}, else every full position closes"
        _check(0.0 <= margin < limit, "maintenance_margin", margin, fact)
        stop = self.max_drawdown
        object.__setattr__(self, "least_share", 0.0 if stop is None else 1.0 - stop)
        _check(stop is None or 0.0 < stop < 1.0, "max_drawdown", stop, "is a share above 0")


class Maths(Protocol):
    """The functions that this module needs."""

    @property
    def log(self) -> Callable[[Number], Number]: ...

    @property
    def log1p(self) -> Callable[[Number], Number]: ...

    def where(self, condition: Number, yes: Number, no: Number, /) -> Number: ...

    def total(self, value: Number, /) -> Number:
        """The sum over the assets."""

    def none(self, condition: Number, /) -> bool:
        """Whether the condition holds nowhere, so that work can be skipped."""


class Floats:
    """For one asset as Python floats."""

    log: Callable[[float], float] = math.log
    log1p: Callable[[float], float] = math.log1p

    @staticmethod
    def where(condition: bool, yes: Number, no: Number) -> Number:
        return yes if condition else no

    @staticmethod
    def total(value: float) -> float:
        return value

    @staticmethod
    def none(condition: bool) -> bool:
        return not condition


class Arrays:
    """For several assets as arrays [A]."""

    log, log1p, total = np.log, np.log1p, staticmethod(np.add.reduce)

    @staticmethod
    def where(condition: Number, yes: Number, no: Number) -> Number:
        if isinstance(condition, np.ndarray):
            return np.where(condition, yes, no)
        return yes if condition else no

    @staticmethod
    def none(condition: NDArray[np.bool_]) -> bool:
        return not condition.any()


FLOATS, ARRAYS = Floats(), Arrays()


def settings_of(kind: type[Settings], given: Mapping[str, object], *, key: str) -> Settings:
    """A dataclass of settings; unknown names are refused with their full key."""
    names = [each.name for each in fields(kind) if each.init]  # type: ignore[arg-type]  # a dataclass
    for name in given:
        if name not in names:
            raise ValueError(f"{key}{name}={given[name]}: unknown; choose from {', '.join(names)}")
    return kind(**given)


def open_account(rules: AccountRules, none: Number, zero: Number) -> Account:
    """An account with cash only; ``none`` is 0.0 per asset, ``zero`` is one 0.0."""
    cash = zero + rules.cash
    return Account(
        *(cash, none, none, none, none, cash, cash, zero, zero, zero, zero, zero), zero > 0.0
    )


def within_limit(m: Maths, share: Number) -> Number:
    """Shares of the leverage per asset, made smaller where their sum exceeds 1."""
    gross = m.total(abs(share))
    return share / m.where(gross > 1.0, gross, 1.0)


def fill(
    m: Maths, rules: AccountRules, account: Account, target: Number, bar: Bar
) -> tuple[Account, Fill]:
    """Trade at the open towards ``target``, the exposure per asset in multiples of the equity.

    After the fill, value == target * equity at the open, costs included. Where ``bar.tradable`` is
    False nothing trades. Trades below ``min_trade`` of the equity are left out, unless they close a
    position.
    """
    cash, units, entry, value, bars, equity, peak, fall, turnover, n_trades, costs, *rest = account
    price, _, _, _, spread, tradable = bar
    where, total = m.where, m.total
    value = units * price
    worth = cash + total(value)
    change = target * worth - value
    is_large = (abs(change) > rules.min_trade * worth) | ((target == 0.0) & (units != 0.0))
    trades = tradable & is_large & (worth > 0.0)
    if m.none(trades):
        return account, NO_FILL
    if m is not FLOATS:
        # Positions that do not trade use a part of the leverage.
        held = total(where(trades, 0.0, abs(value)))
        wanted = total(where(trades, abs(target), 0.0)) * worth
        room = where(rules.leverage * worth > held, rules.leverage * worth - held, 0.0)
        is_full = wanted > room
        target = target * where(is_full, room / where(is_full, wanted, 1.0), 1.0)
        change = target * worth - value

    side = where(change > 0.0, 1.0, -1.0)
    price_paid = price * (1.0 + side * rules.slippage) + side * 0.5 * spread
    # The cost of a trade as a share of its value at mid price, and the costs of all trades.
    ratio = price_paid / price
    rate = where(trades, side * (ratio - 1.0) + rules.commission * ratio, 0.0)
    cost = total(rate * abs(change)) / (1.0 + total(rate * side * target))
    wanted = target * (worth - cost) / price
    # Other assets' costs can turn a small trade round: leave it out.
    trades = trades & ((wanted - units) * side > 0.0)
    wanted = where(trades, wanted, units)
    traded = wanted - units
    volume = abs(traded) * price_paid
    fee = rules.commission * volume
    cost = abs(traded) * abs(price_paid - price) + fee

    stays, is_open = units * wanted > 0.0, wanted != 0.0
    # A position keeps its entry price when it shrinks.
    average = (units * entry + traded * price_paid) / where(is_open, wanted, 1.0)
    kept = where(abs(wanted) > abs(units), average, entry)
    entry = where(stays, kept, where(is_open, price_paid, 0.0))
    bars = where(stays, bars, 0.0 * bars)
    cash = cash - total(traded * price_paid + fee)
    turnover = turnover + total(volume) / equity
    n_trades = n_trades + total(trades * 1.0)
    costs = costs + total(cost)
    units, value = wanted, wanted * price
    after = Account(
        cash, units, entry, value, bars, equity, peak, fall, turnover, n_trades, costs, *rest
    )
    return after, Fill(traded, price_paid, cost)


def mark(m: Maths, rules: AccountRules, account: Account, bar: Bar) -> tuple[Account, Fill]:
    """Charge the bar's financing and value the account at the close.

    A margin call closes all positions at the worst prices of the bar: low for long positions, high
    for short ones. The drawdown stop closes them at the close. Both pay the usual costs, and the
    account ``is_closed`` afterwards. The Fill has the trades that closed it.
    """
    cash, units, entry, _, bars, before, peak, fall, turnover, n_trades, costs, paid, _ = account
    _, high, low, close, spread, _ = bar
    where, total = m.where, m.total
    value = units * close
    if rules.funding or rules.borrowing:
        due = rules.funding * value + where(value < 0.0, -rules.borrowing * value, 0.0)
        due = total(due) + where(cash < 0.0, -rules.borrowing * cash, 0.0)
        cash, paid = cash - due, paid + due
    equity = cash + total(value)
    worst = where(units > 0.0, low, high)
    margin = rules.maintenance_margin * abs(units)
    is_called = cash + total(worst * (units - margin)) <= 0.0
    closed = is_called | (equity <= rules.least_share * peak)
    forced = NO_FILL
    if not m.none(closed):
        side = where(units > 0.0, -1.0, 1.0)
        price = where(is_called, worst, close)
        price_paid = price * (1.0 + side * rules.slippage) + side * 0.5 * spread
        volume = abs(units) * price_paid
        fee = rules.commission * volume
        cost = abs(units) * abs(price_paid - price) + fee
        forced = Fill(where(closed, -units, 0.0), price_paid, where(closed, cost, 0.0))
        equity = where(closed, cash + total(units * price_paid - fee), equity)
        cash = where(closed, equity, cash)
        turnover = turnover + where(closed, total(volume) / before, 0.0)
        n_trades = n_trades + where(closed, total((units != 0.0) * 1.0), 0.0)
        costs = costs + total(forced.cost)
        none = 0.0 * units
        units, entry = where(closed, none, units), where(closed, none, entry)
        value = where(closed, none, value)
    bars = where(units == 0.0, 0.0, bars + 1.0)
    peak = where(equity > peak, equity, peak)
    loss = 1.0 - equity / peak
    fall = where(loss > fall, loss, fall)
    after = Account(
        cash, units, entry, value, bars, equity, peak, fall, turnover, n_trades, costs, paid, closed
    )
    return after, forced


def view(m: Maths, rules: AccountRules, account: Account) -> tuple[Number, Number, Number, Number]:
    """What an agent sees of its account: per asset exposure, profit and age, and the drawdown.

    Exposure is a share of the leverage limit, profit (unrealised) one of the equity, the age of a
    position is log(1 + bars) / 10, and the drawdown is a share of the highest equity.
    """
    _, units, entry, value, bars, equity, peak, *_ = account
    safe = m.where(equity > 0.0, equity, 1.0)
    exposure, profit = value / (safe * rules.leverage), (value - units * entry) / safe
    return exposure, profit, m.log1p(bars) * 0.1, 1.0 - equity / peak


def _check(holds: bool, name: str, value: object, fact: str) -> None:
    if not holds:
        raise ValueError(f"account.{name}={value}: {fact}")
