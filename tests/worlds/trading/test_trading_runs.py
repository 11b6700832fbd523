"""Runs with env=trading and env=torch_trading: their periods, markets, metrics and presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import read_rows, small
from market_rows import HOUR, random_bars, write_table

from ml_pipeline.assembly.compose import plain_config
from ml_pipeline.assembly.run import train
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.errors import UserError
from ml_pipeline.worlds.trading.env import Trading

MARKET = [
    *("env.kwargs.data.market=gaps", "env.kwargs.data.n_bars=400", "env.kwargs.data.n_symbols=2"),
    *("env.kwargs.data.features=[return_1]", "env.kwargs.data.cache_dir=cache"),
    *("env.kwargs.episode_bars=20", "+eval_env.kwargs.period=validation"),
    *("+eval_env.kwargs.random_start=false", "+eval_env.kwargs.symbol=each", "vec_env=auto"),
]


@pytest.mark.parametrize("env", ["trading", "torch_trading"])
def test_a_run_trains_on_one_period_and_is_evaluated_on_another(env: str, here: Path) -> None:
    run = train([*small(n_envs=4, total_steps=256), f"env={env}", *MARKET]).run_dir

    rows = read_rows(run)
    lengths = {float(row["eval/episode_length"]) for row in rows if row["eval/episode_length"]}
    validation = Trading(data=data(), period="validation", random_start=False)
    assert lengths == {float(validation.task.n_steps)}
    assert validation.task.n_steps < 100


@pytest.mark.parametrize("env", ["trading", "torch_trading"])
@pytest.mark.slow
def test_an_evaluation_before_the_first_episode_has_ended_plays_its_whole_period(
    env: str, here: Path
) -> None:
    """Otherwise it would be cut at 1,000 bars, and compare wrongly with later ones."""
    data = "{market: random_walk, n_bars: 10000, features: [return_1], cache_dir: cache}"
    held_out = ["+eval_env.kwargs={period: validation, random_start: false}", "vec_env=auto"]
    run = train([*small(n_envs=4), f"env={env}", f"env.kwargs.data={data}", *held_out]).run_dir

    last = read_rows(run)[-1]
    assert last["rollout/total_episodes"] == "0"
    assert float(last["eval/episode_length"]) > 1_400
    assert float(last["eval/n_cut_episodes"]) == 0.0


def test_a_run_logs_the_outcome_of_its_episodes_and_of_the_whole_evaluated_period(
    here: Path,
) -> None:
    account = "account: {leverage: 3.0, max_drawdown: 0.05}"
    settings = [
        *small(n_envs=4, total_steps=384),
        "env.target=trading_envs.SmallTrading",
        f"+env.kwargs={{episode_bars: 12, window: 2, {account}}}",
        "+eval_env.kwargs={random_start: false, symbol: each, account: {}}",
    ]

    run = train(settings).run_dir

    rows = read_rows(run)
    names = ["equity", "total_return", "max_drawdown", "trades", "turnover", "costs", "financing"]
    for name in (*names, "closed"):
        assert any(row[f"rollout/info/{name}"] for row in rows)
        assert any(row[f"eval/info/{name}"] for row in rows)
    lengths = {float(row["eval/episode_length"]) for row in rows if row["eval/episode_length"]}
    assert lengths == {300.0 - 2.0}


def data() -> dict[str, Any]:
    market = {"market": "gaps", "n_bars": 400, "n_symbols": 2, "cache_dir": "cache"}
    return {**market, "features": ["return_1"]}


def test_the_market_of_a_config_is_mapped_and_not_copied(here: Path) -> None:
    factory = EnvFactory(
        None, "ml_pipeline.worlds.trading.env.Trading", {"data": data(), "episode_bars": 20}
    )
    env = factory().unwrapped
    assert isinstance(env, Trading)

    base: Any = env.task.market.feature
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base

    assert isinstance(base, np.memmap)
    assert not env.task.market.close.flags.writeable


@pytest.mark.parametrize("env", ["trading", "torch_trading"])
@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("env.kwargs.data.market=bull", "market=bull"),
        ("env.kwargs.period=tomorrow", "period=tomorrow"),
        ("env.kwargs.episode_bars=1000", "episode_bars=1000: the period train has"),
        ("+env.kwargs.account.fee=1", "account.fee=1: unknown"),
    ],
)
def test_mistakes_in_the_config_are_one_line(
    env: str, override: str, error: str, here: Path
) -> None:
    with pytest.raises(UserError, match=error) as caught:
        train([*small(n_envs=4, total_steps=256), f"env={env}", *MARKET, override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["trading_crypto", "trading_forex"])
@pytest.mark.slow
def test_a_preset_trains_without_files_and_with_them(name: str, here: Path) -> None:
    preset = [
        *small(n_envs=8, total_steps=256, vec_env="auto", callbacks__evaluation__n_episodes=1),
        *(f"experiment={name}", "env.kwargs.data.cache_dir=cache", "env.kwargs.episode_bars=20"),
    ]
    bar = HOUR if name == "trading_crypto" else HOUR // 60
    for symbol, seed in (("EURUSD", 1), ("GBPUSD", 2)):
        write_table(here / f"{symbol}.csv", random_bars(9_000, seed=seed, length=bar))
    files = ["data=files", "env.kwargs.data.path=*USD.csv", "env.kwargs.data.label=end"]

    synthetic = train([*preset, "env.kwargs.data.n_bars=2000"])
    own = train([*preset, *files, *(["env.kwargs.data.bar=15m"] if bar < HOUR else [])])

    for result in (synthetic, own):
        lengths = [row["eval/episode_length"] for row in read_rows(result.run_dir)]
        assert float(lengths[-1]) > 0
    config = plain_config(own.run_dir)
    assert config["env"]["kwargs"]["data"]["path"] == "*USD.csv"
    assert config["eval_env"]["kwargs"]["period"] == "validation"
    assert config["vec_env"]["mode"] == "auto"
