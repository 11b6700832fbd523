"""TradingTask: settings, market, spaces and starts, common to Trading and TorchTrading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.worlds.trading.account import (
    ARRAYS,
    FLOATS,
    Account,
    AccountRules,
    Bar,
    Maths,
    Number,
    open_account,
    settings_of,
    view,
    within_limit,
)
from ml_pipeline.worlds.trading.data.load import load_market
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.rewards import RewardRules

RANDOM, EACH = "random", "each"
VALIDATION = "validation"
N_DRAWS = 2  # random numbers of a start: the row and the symbol


@dataclass(frozen=True)
class TradingSettings:
    """Arguments of both trading envs; conf/env/trading.yaml explains the keys."""

    data: Mapping[str, object] | None = None  # arguments of load_market
    period: str = "train"
    market: Market | None = None  # instead of data; a worker would get a copy of its own
    symbol: str = RANDOM
    portfolio: bool = False
    positions: Sequence[float] | None = (-1.0, 0.0, 1.0)
    window: int = 1
    episode_bars: int = 1_000
    random_start: bool = True
    account: Mapping[str, object] = field(default_factory=dict)
    reward: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("window", "episode_bars"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if (self.data is None) == (self.market is None):
            raise ValueError("data: give either data, the arguments of load_market, or market")
        if self.portfolio and self.symbol != RANDOM:
            raise ValueError(
                f"symbol={self.symbol}: a portfolio holds every symbol; use symbol={RANDOM}"
            )


class TradingTask:
    """The checked settings of a trading env, with its market and its spaces."""

    def __init__(self, given: Mapping[str, object]) -> None:
        settings = settings_of(TradingSettings, given, key="")
        self.rules = settings_of(AccountRules, settings.account, key="account.")
        self.reward_rules = settings_of(RewardRules, settings.reward, key="reward.")
        self.window = settings.window
        self.portfolio = settings.portfolio
        self.m: Maths = ARRAYS if self.portfolio else FLOATS  # of the functions of trading_account
        self.symbol = settings.symbol
        self.market = market = _market_of(settings)
        _check_spread(market, self.rules)
        n_rows = len(market.time)
        self.n_assets = len(market.symbols) if self.portfolio else 1
        self.first_row = self.window - 1
        n_bars = n_rows - self.window  # with an order at the first row that has a full window
        self.n_steps = settings.episode_bars if settings.random_start else n_bars
        if n_bars < self.n_steps or n_bars < 1:
            raise ValueError(
                f"episode_bars={settings.episode_bars}: the period {settings.period} has "
                f"{n_rows} bars, of which a window of {self.window} leaves {max(n_bars, 0)}; "
                "use fewer, a longer period, or random_start=false for one episode over all of it"
            )
        self.n_starts = n_bars - self.n_steps + 1 if settings.random_start else 1
        self.symbol_number(self.symbol, seed=0)  # refuses an unknown name
        self.low = -1.0 if self.rules.shorts else 0.0  # the lowest position
        self.positions = self._checked_positions(settings.positions)
        self.action_space = self._action_space()
        n_features = self.window * self.n_assets * len(market.features)
        self.n_account = 3 * self.n_assets + 1  # numbers of an observation
        shape = (n_features + self.n_account,)
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, dtype=np.float32)

    def symbol_number(self, symbol: str, *, seed: int) -> int | None:
        """The column of a fixed symbol; None if each episode draws one, or a portfolio has all."""
        if symbol == RANDOM:
            return None
        if symbol == EACH:
            return seed % len(self.market.symbols)
        if symbol not in self.market.symbols:
            known = ", ".join(self.market.symbols[:20])
            raise ValueError(
                f"symbol={symbol}: not in the market; choose {RANDOM}, {EACH} or one of {known}"
            )
        return self.market.symbols.index(symbol)

    def bars(self, first: int, end: int, symbol: int | slice) -> NDArray[np.float64]:
        """Rows [first, end) as [n, 6] of one symbol or [n, 6, S]: the fields of a Bar."""
        market, rules = self.market, self.rules
        place = (slice(first, end), symbol)
        opens = market.open[place]
        spread = market.spread[place] if rules.spread is None else rules.spread * opens
        columns = (opens, market.high[place], market.low[place], market.close[place], spread)
        return np.stack((*columns, market.tradable[place]), axis=1, dtype=np.float64)

    def new_account(self) -> Account:
        return open_account(self.rules, np.zeros(self.n_assets) if self.portfolio else 0.0, 0.0)

    def target(self, action: Any) -> Number:
        """The exposure that an action asks for, per asset, in multiples of the equity."""
        positions, leverage = self.positions, self.rules.leverage
        if not self.portfolio:
            if positions is not None:
                return positions[action] * leverage
            wanted = float(action[0])
            return leverage * (self.low if wanted < self.low else 1.0 if wanted > 1.0 else wanted)
        if positions is not None:
            share = np.array(positions)[action]
        else:
            share = np.clip(np.asarray(action, dtype=np.float64), self.low, 1.0)
        return within_limit(ARRAYS, share) * leverage

    def observation(self, rows: NDArray[np.float32], account: Account) -> NDArray[np.float32]:
        """What an agent sees: the features of the last ``window`` rows, and its account."""
        seen = np.hstack(view(self.m, self.rules, account))
        return np.concatenate((rows, seen), axis=None, dtype=np.float32)

    def outcome(self, account: Account) -> dict[str, Number]:
        """What a run logs of an ended episode."""
        return {
            "equity": account.equity,
            "total_return": account.equity / self.rules.cash - 1.0,
            "max_drawdown": account.drawdown,
            "trades": account.n_trades,
            "turnover": account.turnover,
            "costs": account.costs,
            "financing": account.financing,
            "closed": account.is_closed,
        }

    def _checked_positions(self, given: Sequence[float] | None) -> tuple[float, ...] | None:
        if given is None:
            return None
        positions = tuple(float(each) for each in given)
        if len(positions) < 2 or not all(-1.0 <= each <= 1.0 for each in positions):
            raise ValueError(f"positions={positions}: name at least two, each from -1 to 1")
        if min(positions) < 0.0 and not self.rules.shorts:
            raise ValueError(f"positions={positions}: account.shorts=False; remove those below 0")
        return positions

    def _action_space(self) -> AnySpace:
        if self.positions is None:
            return spaces.Box(self.low, 1.0, (self.n_assets,), dtype=np.float32)
        if self.portfolio:
            return spaces.MultiDiscrete([len(self.positions)] * self.n_assets)
        return spaces.Discrete(len(self.positions))


class JudgedOnBars:
    """The base of both trading envs; a ``JudgedEnv``."""

    judge_command: ClassVar[str] = "judge"
    judge: ClassVar[str] = "ml_pipeline.worlds.trading.judge.facts_for_deployment"

    @classmethod
    def why_not_select(cls, kwargs: Mapping[str, object]) -> str | None:
        """Why a study must not select trials by these bars: those of train and test."""
        period = kwargs.get("period", "train")
        if period == VALIDATION:
            return None
        return (
            f"eval_env.kwargs.period={period}: a study selects trials by their evaluations, and "
            "the test period must stay unseen; add +eval_env.kwargs.period=validation"
        )


def bar_of(columns: Iterable[Number]) -> Bar:
    """A Bar from six numbers or six arrays."""
    opens, high, low, close, spread, tradable = columns
    return Bar(opens, high, low, close, spread, tradable > 0.5)


def _market_of(settings: TradingSettings) -> Market:
    if settings.market is not None:
        market = settings.market
        _check_prices(market)  # load_market has checked those of files
    else:
        market = load_market(period=settings.period, **(settings.data or {}))
    # Plain views of memory-mapped arrays: np.memmap is slow to index.
    plain: list[Any] = [np.asarray(each) for each in market[2:]]
    return Market(market.symbols, market.features, *plain)


def _check_prices(market: Market) -> None:
    for name in ("open", "high", "low", "close"):
        values = getattr(market, name)
        wrong = np.argwhere(~(np.isfinite(values) & (values > 0.0)))
        if len(wrong):
            row, column = wrong[0]
            raise ValueError(
                f"market.{name}[{row}] of {market.symbols[column]} is {values[row, column]}; "
                "prices must be finite and above 0"
            )


def _check_spread(market: Market, rules: AccountRules) -> None:
    """Refuse spreads that would make a seller pay."""
    if rules.spread is not None:
        return
    highest = 2.0 * (1.0 - rules.slippage) * market.low
    if not np.all((market.spread >= 0.0) & (market.spread < highest)):
        raise ValueError(
            "account.spread=None: the market has a spread below 0 or above twice the price; "
            "set account.spread, a share of the price"
        )
