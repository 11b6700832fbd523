"""Walk a trading policy over a period, bar by bar, and buy and hold over the same bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.analysis.statistics import Array
from ml_pipeline.envs.factory import step_errors_named
from ml_pipeline.envs.kinds import AnyEnv
from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.worlds.trading.account import FLOATS, NO_FILL, fill, mark, open_account
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.task import TradingTask, bar_of


class WalkError(UserError):
    """An env cannot be walked from the first to the last bar of its period."""


class Trade(NamedTuple):
    """One filled order, or a forced sale."""

    time: int  # UTC nanoseconds: the end of the bar
    symbol: str
    units: float  # bought; negative: sold
    price: float  # with spread and slippage
    cost: float  # spread, slippage and commission, in money
    reason: str  # order | forced: a margin call or the drawdown stop
    equity: float  # of the account at the close of the bar


class Walk(NamedTuple):
    """A policy over a period; A accounts: one per symbol, or one for a portfolio."""

    accounts: tuple[str, ...]
    time: NDArray[np.int64]  # [T + 1]
    equity: Array  # [T + 1, A] in multiples of the first equity; flat after an account is closed
    exposure: Array  # [T + 1, A] value of the positions / equity; negative: short
    gross: Array  # [T + 1, A] sum of the sizes of the positions / equity
    hold: Array  # [T + 1] equity of buy-and-hold over the same bars
    turnover: Array  # [A] traded value, in multiples of the equity at each trade
    trades: list[Trade]
    closed: dict[str, int]  # account: when a margin call or the drawdown stop closed it


def walk(policy: Policy, envs: Sequence[AnyEnv]) -> Walk:
    """The policy's greedy actions in every env; each must play its whole period from row one."""
    cores = [_core(env) for env in envs]
    first = cores[0].task
    n_steps, market, total = first.n_steps, first.market, first.m.total
    names = ("portfolio",) if first.portfolio else tuple(core.symbol for core in cores)
    shape = (n_steps + 1, len(envs))
    equity, exposure, gross = np.full(shape, first.rules.cash), np.zeros(shape), np.zeros(shape)
    trades: list[Trade] = []
    closed: dict[str, int] = {}
    with step_errors_named():
        obs = np.stack([env.reset(seed=number)[0] for number, env in enumerate(envs)])
    rows = market.time[cores[0].row :]
    memory = policy.new_memory(len(envs))
    for step in range(1, n_steps + 1):
        equity[step] = equity[step - 1]
        action = policy.act_batch(obs, True, action_mask=policy.mask_of({}), memory=memory)
        for number, (env, core) in enumerate(zip(envs, cores, strict=True)):
            if names[number] in closed:
                continue
            with step_errors_named():
                obs[number], _, terminated, truncated, _ = env.step(action[number])
            account = core.account
            equity[step, number] = account.equity
            if account.equity > 0.0:
                exposure[step, number] = total(account.value) / account.equity
                gross[step, number] = total(abs(account.value)) / account.equity
            if core.fill is not NO_FILL or core.forced is not NO_FILL:
                trades += _trades(core, int(rows[step]), market)
            if terminated:
                closed[names[number]] = int(rows[step])
            elif truncated != (step == n_steps):
                raise WalkError(
                    f"the env ended after {step} of {n_steps} bars; remove the wrapper that ends it"
                )
        if len(closed) == len(envs):
            equity[step:] = equity[step]
            break
    turnover = np.array([float(core.account.turnover) for core in cores])
    time = np.asarray(rows, dtype=np.int64)
    hold = buy_and_hold(first, market.symbols if first.portfolio else names)
    shares = equity / first.rules.cash
    return Walk(names, time, shares, exposure, gross, hold, turnover, trades, closed)


def _core(env: AnyEnv) -> Trading:
    core = env.unwrapped
    if not isinstance(core, Trading):
        raise WalkError(f"{type(core).__name__}: not a trading env; judge a run of env=trading")
    if core.task.n_starts != 1:
        raise WalkError("random_start=True: the walk must begin at the first row of the period")
    return core


def _trades(core: Trading, time: int, market: Market) -> list[Trade]:
    equity = float(core.account.equity)
    symbols = market.symbols if core.task.portfolio else (core.symbol,)
    return [
        Trade(time, *trade, reason, equity)
        for filled, reason in ((core.fill, "order"), (core.forced, "forced"))
        for trade in filled.trades(symbols)
    ]


def buy_and_hold(task: TradingTask, symbols: Sequence[str]) -> Array:
    """Equity [T + 1] of equal shares of these symbols, bought at the first open and never sold.

    It pays the same costs and funding as the policy, without leverage.
    """
    rules = replace(task.rules, leverage=1.0, maintenance_margin=0.0, max_drawdown=None)
    n_rows = len(task.market.time)
    total = np.zeros(n_rows - task.first_row)
    for symbol in symbols:
        column = task.market.symbols.index(symbol)
        account = open_account(rules, 0.0, 0.0)
        total[0] += account.equity
        bars = task.bars(task.first_row + 1, n_rows, column).tolist()
        for number, values in enumerate(bars, start=1):
            bar = bar_of(values)
            if account.units == 0.0:
                account, _ = fill(FLOATS, rules, account, 1.0, bar)
            account, _ = mark(FLOATS, rules, account, bar)
            total[number] += account.equity
    return np.asarray(total / total[0])
