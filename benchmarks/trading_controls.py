"""Controls of the trading pipeline: it must find an edge that exists, and none that does not.

    python benchmarks/trading_controls.py positive     # 6 trainings, about a minute each
    python benchmarks/trading_controls.py negative     # 100 trainings of a few seconds
    python benchmarks/trading_controls.py selection    # no training: the best of 100 trials

``positive``: PPO trades the synthetic market ``edge`` without costs, 200,000 bars, another market
and another seed each time. Its Sharpe ratio on the test period is divided by the analytic optimum
for positions -1, 0 and 1 (``worlds.trading.data.edge``). Always 1 or -1 by the sign of the signal,
which has the highest mean return, reaches 0.90 of it. The reward ``risk_adjusted`` knows the best
threshold: the agent trades where |correlation * signal| > variance_penalty * volatility.

``negative``: one PPO policy is trained on each of 100 random walks of 10,000 bars without costs,
with the default features, and judged on the test period of its walk, by the command's own rule.

``selection``: on each of 100 random walks, the best of 100 random policies on the judged period
itself is judged, with the true number of trials and as if it had been the only one.

Results are added to benchmarks/results/trading_controls.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline import train
from ml_pipeline.analysis.statistics import Array
from ml_pipeline.worlds.trading.data.edge import optimal_sharpe
from ml_pipeline.worlds.trading.data.load import load_market
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.judge import judge_run
from ml_pipeline.worlds.trading.judgement import judge
from ml_pipeline.worlds.trading.statistics import bar_returns, sharpe_ratio
from ml_pipeline.worlds.trading.walk import Walk

RESULTS = Path(__file__).resolve().parent / "results" / "trading_controls.json"
CORRELATION = 0.2
NO_COSTS = {"commission": 0.0, "spread": 0.0}
REWARDS: dict[str, dict[str, Any]] = {
    "log_return": {"kind": "log_return"},
    "risk_adjusted": {"kind": "risk_adjusted", "variance_penalty": 24.0},
}
COMMON: dict[str, Any] = {"logger": "none", "device": "cpu", "quiet": True}


def positive(options: argparse.Namespace) -> dict[str, Any]:
    """The share of the optimal Sharpe ratio that PPO reaches on held-out bars."""
    optimum = optimal_sharpe(CORRELATION, positions="discrete")
    found: dict[str, Any] = {"optimal_sharpe_per_bar": optimum, "runs": []}
    for reward, settings in REWARDS.items():
        for seed in options.seeds:
            begin = time.perf_counter()
            run = train_on_edge(seed, settings, n_bars=200_000, total_steps=options.steps)
            seconds = time.perf_counter() - begin
            result = judge_run(run, period="test", n_trials=1)
            sharpe = result.sharpe / result.periods_per_year**0.5
            facts = {
                "reward": reward,
                "seed": seed,
                "sharpe_per_bar": sharpe,
                "share_of_optimum": sharpe / optimum,
                "claims_edge": result.claims_edge,
                "exposure": result.policy.activity.exposure,
                "bars": len(result.time) - 1,
                "train_seconds": round(seconds, 1),
            }
            found["runs"].append(facts)
            print(facts, flush=True)
    return found


def train_on_edge(seed: int, reward: dict[str, Any], *, n_bars: int, total_steps: int) -> Path:
    """Train PPO on the market ``edge`` number ``seed``; returns the run folder.

    The next return depends on the signal alone, so gamma is 0.
    """
    data = {
        "market": "edge",
        "n_bars": n_bars,
        "seed": seed,
        "features": ["column_signal"],
        "parameters": {"correlation": CORRELATION},
    }
    return train(
        "env=torch_trading",
        "~callbacks.evaluation",  # the last policy is judged
        n_envs=256,
        total_steps=total_steps,
        seed=seed,
        agent={"gamma": 0.0, "n_epochs": 4},
        env={"kwargs": {"data": data, "account": NO_COSTS, "reward": reward}},
        **COMMON,
    ).run_dir


def negative(options: argparse.Namespace) -> dict[str, Any]:
    """How many of the policies on random walks are said to have an edge."""
    judged = []
    for seed in range(options.walks):
        data = {"market": "random_walk", "n_bars": 10_000, "seed": seed}
        run = train(
            "env=torch_trading",
            "~callbacks.evaluation",  # it would select a checkpoint
            n_envs=64,
            total_steps=options.steps,
            seed=seed,
            agent={"n_steps": 64, "n_epochs": 4},
            env={"kwargs": {"data": data, "account": NO_COSTS, "episode_bars": 500}},
            **COMMON,
        ).run_dir
        result = judge_run(run, period="test", n_trials=1)
        judged.append(result)
        if result.claims_edge or seed % 10 == 9:
            claims = sum(each.claims_edge for each in judged)
            print(f"{seed + 1} walks, {claims} claims; {result.verdict}", flush=True)
    confidence = np.array([each.probabilistic for each in judged])
    return {
        "walks": len(judged),
        "bars": len(judged[0].time) - 1,
        "total_steps": options.steps,
        "claims": sum(each.claims_edge for each in judged),
        "probabilistic_sharpe_above_0.95": int((confidence >= 0.95).sum()),
        "probabilistic_sharpe_mean": float(confidence.mean()),
        "mean_exposure": float(np.mean([each.policy.activity.exposure for each in judged])),
        "mean_trades": float(np.mean([each.policy.activity.trades for each in judged])),
    }


def selection(options: argparse.Namespace) -> dict[str, Any]:
    """The best of many random policies, judged with and without the number of trials."""
    n_trials, claims = 100, {"with_trials": 0, "as_one_trial": 0}
    for seed in range(options.walks):
        market = load_market(
            period="test", market="random_walk", n_bars=10_000, seed=seed, features=["return_1"]
        )
        returns = market.close[1:, 0] / market.close[:-1, 0] - 1.0
        random = np.random.default_rng(seed)
        # A new position of -1, 0 or 1 every 20 bars in the mean.
        changes = random.random((n_trials, len(returns))) < 0.05
        drawn = random.integers(-1, 2, changes.shape)
        last = np.maximum.accumulate(np.where(changes, np.arange(len(returns)), 0), axis=1)
        position = np.take_along_axis(drawn, last, axis=1)
        equity = np.cumprod(1.0 + position * returns, axis=1)
        curves = [np.concatenate(([1.0], each)) for each in equity]
        best = max(curves, key=lambda each: sharpe_ratio(bar_returns(each)))
        walk = walk_of(market, best)
        for name, number in (("with_trials", n_trials), ("as_one_trial", 1)):
            judged = judge({"best": walk}, period="test", n_trials=number, is_held_out=True)
            claims[name] += judged.claims_edge
    return {"walks": options.walks, "trials": n_trials, "claims": claims}


def walk_of(market: Market, equity: Array) -> Walk:
    hold = market.close[:, 0] / market.close[0, 0]
    none = np.zeros((len(equity), 1))
    return Walk(market.symbols, market.time, equity[:, None], none, none, hold, np.zeros(1), [], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("control", choices=("positive", "negative", "selection"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--steps", type=int, help="env steps of each training")
    options = parser.parse_args()
    options.steps = options.steps or (500_000 if options.control == "positive" else 30_000)
    control = {"positive": positive, "negative": negative, "selection": selection}
    os.chdir(tempfile.mkdtemp())
    begin = time.perf_counter()
    found = control[options.control](options)
    found |= {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": round(time.perf_counter() - begin),
    }
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, options.control: found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
