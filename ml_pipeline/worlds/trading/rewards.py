"""Rewards of trading, from the account before and after a bar; on floats, arrays or tensors.

``log_return``: log(equity / equity before). ``differential_sharpe``: how much this bar's return
changes an exponentially weighted Sharpe ratio (Moody & Saffell 2001, "Learning to trade via direct
reinforcement"), between -10 and 10. ``risk_adjusted``: the log-return, minus each penalty times its
measure: the squared log-return, the growth of the drawdown, the bar's turnover.
"""

from __future__ import annotations

from dataclasses import dataclass

from ml_pipeline.worlds.trading.account import Account, Maths, Number

KINDS = ("log_return", "differential_sharpe", "risk_adjusted")
RUIN = 1e-3  # a bar that leaves a smaller share of the equity counts as if it left this one
MAX_SHARPE = 10.0  # the first returns of an episode have almost no variance
MIN_VARIANCE = 1e-14

Moments = tuple[Number, Number]  # running mean and mean square of the returns


@dataclass(frozen=True)
class RewardRules:
    """The kind of reward and its parameters; conf/env/trading.yaml explains the keys."""

    kind: str = "log_return"
    sharpe_rate: float = 0.01
    variance_penalty: float = 0.0
    drawdown_penalty: float = 0.0
    turnover_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"reward.kind={self.kind}: unknown; choose from {', '.join(KINDS)}")
        if not 0.0 < self.sharpe_rate < 1.0:
            raise ValueError(f"reward.sharpe_rate={self.sharpe_rate}: must be between 0 and 1")
        for name in ("variance_penalty", "drawdown_penalty", "turnover_penalty"):
            value = getattr(self, name)
            if value < 0.0:
                raise ValueError(f"reward.{name}={value}: is negative; use 0 to switch it off")
            if value > 0.0 and self.kind != "risk_adjusted":
                raise ValueError(
                    f"reward.{name}={value}: reward.kind={self.kind} has no penalties; "
                    "use reward.kind=risk_adjusted"
                )


def reward(
    m: Maths, rules: RewardRules, before: Account, after: Account, moments: Moments
) -> tuple[Number, Moments]:
    """The reward of a bar, and the next moments."""
    ratio = after.equity / before.equity
    ratio = m.where(ratio > RUIN, ratio, RUIN)
    if rules.kind == "differential_sharpe":
        return _differential_sharpe(m, rules.sharpe_rate, ratio - 1.0, moments)
    log_return = m.log(ratio)
    if rules.kind == "log_return":
        return log_return, moments
    growth = before.equity / before.peak - after.equity / after.peak
    return (
        log_return
        - rules.variance_penalty * log_return * log_return
        - rules.drawdown_penalty * m.where(growth > 0.0, growth, 0.0)
        - rules.turnover_penalty * (after.turnover - before.turnover)
    ), moments


def _differential_sharpe(
    m: Maths, rate: float, bar_return: Number, moments: Moments
) -> tuple[Number, Moments]:
    mean, square = moments
    off_mean, off_square = bar_return - mean, bar_return * bar_return - square
    variance = square - mean * mean
    is_known = variance > MIN_VARIANCE
    variance = m.where(is_known, variance, 1.0)
    change = (square * off_mean - 0.5 * mean * off_square) / variance**1.5
    change = m.where(change > MAX_SHARPE, MAX_SHARPE, change)
    change = m.where(change < -MAX_SHARPE, -MAX_SHARPE, change)
    return m.where(is_known, change, 0.0), (mean + rate * off_mean, square + rate * off_square)
