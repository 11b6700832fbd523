"""Policies of short trading runs on small market files, for the tests of paper trading."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from conftest import only_run, small
from market_rows import write_table

from ml_pipeline.assembly.load import export_run
from ml_pipeline.assembly.run import train
from ml_pipeline.worlds.trading.data.bars import Bars
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars

N_BARS = 300

# Name -> further overrides of the run. The symbols of the market have different gaps.
CASES = {
    "each": ["network=lstm", "network.size=8", "env.kwargs.symbol=each", "agent.n_minibatches=1"],
    "one": ["env.kwargs.symbol=SYN1", "env.kwargs.window=3", "env.kwargs.account.leverage=2"],
    "portfolio": ["env.kwargs.portfolio=true", "env.kwargs.positions=null"],
    "stopped": ["env.kwargs.account.max_drawdown=0.02"],
}


class Trained(NamedTuple):
    """A policy, its market files, and the arguments of its env."""

    policy: Path
    prices: Path  # a folder
    kwargs: dict[str, Any]


def market_bars() -> dict[str, Bars]:
    return synthetic_bars(
        "gaps", n_symbols=2, n_bars=N_BARS, bar="1h", seed=3, parameters={"outage_share": 0.1}
    )


def write_market(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for symbol, bars in market_bars().items():
        write_table(folder / f"{symbol}.csv", bars)
    return folder


def trained(name: str) -> Trained:
    """Train in the current folder."""
    prices = write_market(Path("prices"))
    data = {"path": str(prices), "label": "end", "cache_dir": "cache", "validation": 0.25}
    features = "[column_signal,return_1,ema_5,volatility_6,time_of_day]"
    train(
        [
            *small(),
            *("env=trading", "data=files", "env.kwargs.episode_bars=20"),
            *(f"env.kwargs.data.{key}={value}" for key, value in data.items()),
            *(f"env.kwargs.data.features={features}", "~callbacks.evaluation"),
            *CASES[name],
        ]
    )
    _, path, policy, _ = export_run(only_run(Path.cwd()), None, file_format="pt2")
    return Trained(path, prices, policy.metadata["env"]["kwargs"])
