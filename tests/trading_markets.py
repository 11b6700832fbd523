"""Small markets of random numbers for the tests of the trading envs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ml_pipeline.worlds.trading.data.market import Market


def random_market(
    n_rows: int = 60, n_symbols: int = 3, *, seed: int = 0, volatility: float = 0.02
) -> Market:
    """Random walks whose bars gap at the open, with spreads, and with rows without trading."""
    random = np.random.default_rng(seed)
    shape = (n_rows, n_symbols)
    steps = random.normal(0.0, volatility, (2, *shape))
    walk = 100.0 * np.exp(np.cumsum(steps.sum(0), axis=0))
    close, opens = walk, walk * np.exp(-steps[1])
    high = np.maximum(opens, close) * (1.0 + random.uniform(0.0, volatility, shape))
    low = np.minimum(opens, close) * (1.0 - random.uniform(0.0, volatility, shape))
    return Market(
        symbols=tuple(f"S{i}" for i in range(n_symbols)),
        features=("first", "second"),
        time=np.arange(n_rows) * 60_000_000_000,
        open=opens,
        high=high,
        low=low,
        close=close,
        volume=random.uniform(1.0, 2.0, shape),
        spread=close * random.uniform(0.0, 0.002, shape),
        tradable=random.random(shape) > 0.1,
        feature=random.normal(size=(*shape, 2)).astype(np.float32),
    )


def changed_after(market: Market, row: int, *, seed: int = 1) -> Market:
    """The same market up to and including ``row``; every later number differs."""
    other = random_market(len(market.time), len(market.symbols), seed=seed, volatility=0.5)
    parts = []
    for ours, theirs in zip(market[2:], other[2:], strict=True):
        part = np.array(ours)
        part[row + 1 :] = ~part[row + 1 :] if part.dtype == bool else theirs[row + 1 :] * 3
        parts.append(part)
    return Market(market.symbols, market.features, *parts)


def flat_market(prices: list[float], *, open_prices: list[float] | None = None) -> Market:
    """One symbol whose bars have no range beyond open and close, no spread and no gaps."""
    close = np.array(prices, dtype=np.float64)[:, None]
    opens = np.array(open_prices or [prices[0], *prices[:-1]], dtype=np.float64)[:, None]
    return Market(
        symbols=("A",),
        features=("price",),
        time=np.arange(len(close)) * 60_000_000_000,
        open=opens,
        high=np.maximum(opens, close),
        low=np.minimum(opens, close),
        close=close,
        volume=np.ones_like(close),
        spread=np.zeros_like(close),
        tradable=np.ones(close.shape, dtype=bool),
        feature=close[:, :, None].astype(np.float32),
    )


FREE = {"commission": 0.0, "slippage": 0.0, "spread": 0.0}
COSTS = {"commission": 0.001, "slippage": 0.0005, "funding": 0.0002, "borrowing": 0.0003}

# Settings that together cover every option of the trading envs.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "costs": {"account": {**COSTS, "spread": 0.001}},
    "leverage": {"account": {**COSTS, "leverage": 4.0, "maintenance_margin": 0.2}},
    "drawdown stop": {"account": {"max_drawdown": 0.05, "leverage": 2.0}},
    "continuous": {"positions": None, "account": COSTS},
    "long only": {"positions": None, "account": {"shorts": False, "min_trade": 0.1}},
    "portfolio": {"portfolio": True, "account": {**COSTS, "leverage": 2.0}},
    "continuous portfolio": {
        "portfolio": True,
        "positions": None,
        "window": 2,
        "account": {"max_drawdown": 0.2, "leverage": 5.0, "slippage": 0.002},
    },
    "differential Sharpe": {"reward": {"kind": "differential_sharpe"}, "symbol": "S1"},
    "risk-adjusted": {
        "reward": {
            "kind": "risk_adjusted",
            "variance_penalty": 2.0,
            "drawdown_penalty": 0.5,
            "turnover_penalty": 0.001,
        },
        "symbol": "each",
    },
    "window": {"window": 5, "positions": [-0.5, 0.0, 0.25, 1.0]},
    "whole period": {"random_start": False},
}
