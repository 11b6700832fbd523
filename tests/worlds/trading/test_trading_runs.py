"""Runs in the trading envs: their metrics and their evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import read_rows, small

from ml_pipeline.assembly.run import train


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
