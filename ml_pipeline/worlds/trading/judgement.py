"""The judgement of trading runs on held-out bars: figures, intervals and the verdict.

An edge is claimed only if all of this holds, for the equity of all runs and symbols together:

1. the policy was not trained on these bars, and there are at least ``MIN_BARS`` of them;
2. the deflated Sharpe ratio, corrected for the number of trials, is at least ``CONFIDENCE``;
3. the 95 % interval of the Sharpe ratio minus that of the better benchmark, cash (0) or
   buy-and-hold, is above 0. Its bootstrap resamples blocks of bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.analysis.statistics import Array, Estimate, estimate
from ml_pipeline.metrics import counted
from ml_pipeline.worlds.trading.data.market import periods_per_year
from ml_pipeline.worlds.trading.statistics import (
    annual_return,
    bar_returns,
    block_length,
    calmar_ratio,
    deflated_sharpe,
    max_drawdown,
    sharpe_draws,
    sharpe_ratio,
    sortino_ratio,
    varies,
)
from ml_pipeline.worlds.trading.walk import Walk, WalkError

CONFIDENCE = 0.95
MIN_BARS = 250  # with fewer, normal approximations and intervals are too rough


class Figures(NamedTuple):
    """An equity curve in numbers; ratios are those of a year."""

    total_return: float
    annual_return: float
    volatility: float
    sharpe: float
    sortino: float
    max_drawdown: float
    calmar: float


class Activity(NamedTuple):
    """How much a policy trades; means over its accounts."""

    turnover: float  # per year, in multiples of the equity
    exposure: float  # mean size of the positions / equity
    net_exposure: float  # the same, signed
    trades: int  # of all accounts together


class Part(NamedTuple):
    """The policy as a whole, one run, or one symbol over all runs."""

    name: str
    figures: Figures
    activity: Activity
    sharpe: Estimate  # of a year
    deflated: float  # confidence in a Sharpe ratio above the best of n_trials without skill


class Judgement(NamedTuple):
    """The verdict on one or several runs over a period, and what it rests on."""

    claims_edge: bool
    verdict: str
    remarks: list[str]
    period: str
    n_trials: int
    block: int  # bars
    periods_per_year: float
    time: NDArray[np.int64]  # [T + 1]
    equity: Array  # [T + 1] mean of all runs and accounts
    hold_equity: Array  # [T + 1]
    policy: Part  # all runs and accounts together
    hold: Figures
    excess: Estimate  # Sharpe ratio minus that of the better benchmark, of a year
    probabilistic: float  # confidence in a Sharpe ratio above 0
    best_without_skill: float  # of a year
    runs: list[Part]
    symbols: list[Part]
    walks: dict[str, Walk]

    @property
    def sharpe(self) -> float:
        """Of a year."""
        return self.policy.figures.sharpe


def judge(walks: Mapping[str, Walk], *, period: str, n_trials: int, is_held_out: bool) -> Judgement:
    """Judge the walks of several runs, by name, as one account with equal shares of capital.

    ``is_held_out``: no run was trained on these bars.
    """
    each = list(walks.values())
    first = each[0]
    for name, other in walks.items():
        if other.accounts != first.accounts or not np.array_equal(other.time, first.time):
            raise WalkError(f"{name}: walks other bars than {next(iter(walks))}; judge them apart")
    hold_equity, per_year = first.hold, periods_per_year(first.time)
    equity = np.mean([walk.equity.mean(axis=1) for walk in each], axis=0)
    returns = np.stack([bar_returns(equity), bar_returns(hold_equity)], axis=1)
    block = max(block_length(column) for column in (*returns.T, np.abs(returns[:, 0])))
    draws = sharpe_draws(returns, block)
    ratios = [sharpe_ratio(column) for column in returns.T]
    scale = math.sqrt(per_year)
    n_trials = max(n_trials, len(walks))
    excess = estimate(
        scale * (ratios[0] - max(ratios[1], 0.0)),
        scale * (draws[:, 0] - np.maximum(draws[:, 1], 0.0)),
    )
    deflated, best = deflated_sharpe(returns[:, 0], n_trials)
    why_not = _why_not(returns[:, 0], excess, deflated, scale * best, n_trials, is_held_out)
    hold = figures_of(hold_equity, per_year)
    policy = Part(
        "policy",
        figures_of(equity, per_year),
        _activity(each, slice(None), per_year),
        estimate(scale * ratios[0], scale * draws[:, 0]),
        deflated,
    )
    return Judgement(
        claims_edge=not why_not,
        verdict=_verdict(period, policy, excess, n_trials, why_not),
        remarks=_remarks(walks, period, policy.figures, hold, n_trials),
        period=period,
        n_trials=n_trials,
        block=block,
        periods_per_year=per_year,
        time=first.time,
        equity=equity,
        hold_equity=hold_equity,
        policy=policy,
        hold=hold,
        excess=excess,
        probabilistic=deflated_sharpe(returns[:, 0], 1)[0],
        best_without_skill=scale * best,
        runs=[_part(name, [walk], slice(None), per_year, n_trials) for name, walk in walks.items()],
        symbols=[
            _part(name, each, slice(number, number + 1), per_year, n_trials)
            for number, name in enumerate(first.accounts)
        ],
        walks=dict(walks),
    )


def figures_of(equity: Array, per_year: float) -> Figures:
    returns, scale = bar_returns(equity), math.sqrt(per_year)
    return Figures(
        total_return=float(equity[-1] / equity[0] - 1.0),
        annual_return=annual_return(equity, per_year),
        volatility=float(returns.std(ddof=1)) * scale,
        sharpe=sharpe_ratio(returns) * scale,
        sortino=sortino_ratio(returns) * scale,
        max_drawdown=max_drawdown(equity),
        calmar=calmar_ratio(equity, per_year),
    )


def _part(name: str, walks: Sequence[Walk], columns: slice, per_year: float, n_trials: int) -> Part:
    equity = np.mean([walk.equity[:, columns].mean(axis=1) for walk in walks], axis=0)
    returns, scale = bar_returns(equity), math.sqrt(per_year)
    block = max(block_length(returns), block_length(np.abs(returns)))
    draws = sharpe_draws(returns[:, None], block)[:, 0]
    return Part(
        name,
        figures_of(equity, per_year),
        _activity(walks, columns, per_year),
        estimate(scale * sharpe_ratio(returns), scale * draws),
        deflated_sharpe(returns, n_trials)[0],
    )


def _activity(walks: Sequence[Walk], columns: slice, per_year: float) -> Activity:
    years = (len(walks[0].time) - 1) / per_year
    names = set(walks[0].accounts[columns])
    is_all = len(names) == len(walks[0].accounts)
    return Activity(
        turnover=float(np.mean([walk.turnover[columns] for walk in walks])) / years,
        exposure=float(np.mean([walk.gross[1:, columns] for walk in walks])),
        net_exposure=float(np.mean([walk.exposure[1:, columns] for walk in walks])),
        trades=sum(is_all or trade.symbol in names for walk in walks for trade in walk.trades),
    )


def _why_not(
    returns: Array, excess: Estimate, deflated: float, best: float, n_trials: int, is_held_out: bool
) -> list[str]:
    """The conditions that fail."""
    reasons = []
    if not is_held_out:
        reasons.append("the policy was trained on these bars")
    if len(returns) < MIN_BARS:
        reasons.append(f"{len(returns)} bars are fewer than {MIN_BARS}")
    if not varies(returns):
        return [*reasons, "the equity does not move"]
    if deflated < CONFIDENCE:
        luck = f" (the best of {n_trials:,} trials without skill is expected to reach {best:.2f})"
        reasons.append(
            f"the deflated Sharpe ratio {deflated:.3f} is below {CONFIDENCE}"
            + (luck if n_trials > 1 else "")
        )
    if not excess.low > 0.0:
        reasons.append(
            "the interval of the Sharpe ratio minus that of the better benchmark, "
            f"{excess.low:.2f} to {excess.high:.2f}, is not above 0"
        )
    return reasons


def _verdict(
    period: str, policy: Part, excess: Estimate, n_trials: int, why_not: Sequence[str]
) -> str:
    sharpe = policy.sharpe
    shown = f"Sharpe ratio {sharpe.value:.2f} (95 % interval {sharpe.low:.2f} to {sharpe.high:.2f})"
    if why_not:
        return f"no edge can be claimed on the period {period}: {shown}; {'; '.join(why_not)}"
    return (
        f"an edge can be claimed on the period {period}: {shown}, deflated Sharpe ratio "
        f"{policy.deflated:.3f} after {counted(n_trials, 'trial')}, "
        f"{excess.value:.2f} ({excess.low:.2f} to {excess.high:.2f}) above the better of cash and "
        "buy-and-hold"
    )


def _remarks(
    walks: Mapping[str, Walk], period: str, figures: Figures, hold: Figures, n_trials: int
) -> list[str]:
    lines = []
    for name, walk in walks.items():
        for account, when in walk.closed.items():
            day = np.datetime64(when, "ns").astype("datetime64[m]")
            lines.append(
                f"{name}, {account}: a margin call or the drawdown stop closed the account at "
                f"{day} UTC; its equity is flat afterwards"
            )
    if not any(walk.trades for walk in walks.values()):
        lines.append("the policy never traded")
    if figures.total_return < hold.total_return:
        lines.append(
            f"buy-and-hold earned more: {hold.total_return:+.1%} instead of "
            f"{figures.total_return:+.1%}"
        )
    if n_trials == 1:
        lines.append(
            "1 trial: if you chose this run among others, by hand too, add --trials with their "
            "number"
        )
    if period == "validation":
        lines.append(
            "the checkpoint or the study may have been selected on this period; only the test "
            "period is untouched"
        )
    return lines


def as_json(judgement: Judgement) -> dict[str, object]:
    """Everything but the curves; infinite ratios are null."""
    first, last = iso_times(judgement.time[[0, -1]])
    return {
        "verdict": judgement.verdict,
        "claims_edge": judgement.claims_edge,
        "remarks": judgement.remarks,
        "period": judgement.period,
        "from": first,
        "to": last,
        "bars": len(judgement.time) - 1,
        "periods_per_year": judgement.periods_per_year,
        "trials": judgement.n_trials,
        "block_bars": judgement.block,
        "sharpe_interval": _numbers(judgement.policy.sharpe),
        "excess_sharpe_interval": _numbers(judgement.excess),
        "probabilistic_sharpe": judgement.probabilistic,
        "deflated_sharpe": judgement.policy.deflated,
        "best_sharpe_without_skill": judgement.best_without_skill,
        "strategy": _part_figures(judgement.policy),
        "buy_and_hold": _finite(judgement.hold._asdict()),
        "runs": [_part_json(part) for part in judgement.runs],
        "symbols": [_part_json(part) for part in judgement.symbols],
    }


def _part_json(part: Part) -> dict[str, object]:
    interval = _numbers(part.sharpe)
    return {
        "name": part.name,
        **_part_figures(part),
        "sharpe_interval": interval,
        "deflated": part.deflated,
    }


def _part_figures(part: Part) -> dict[str, float | None]:
    return _finite({**part.figures._asdict(), **part.activity._asdict()})


def _numbers(estimate: Estimate) -> list[float]:
    return [float(estimate.low), float(estimate.high)]


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def iso_times(time: NDArray[np.int64]) -> list[str]:
    """Nanoseconds since 1970 -> 2024-01-31T00:00:00."""
    return [str(each) for each in time.astype("datetime64[ns]").astype("datetime64[s]")]
