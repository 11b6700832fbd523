"""Trading: one account in a market of bars; the agent chooses its exposure bar by bar.

A step from row t to row t + 1: the agent has seen row t. Its order fills at the open of row t + 1,
with that row's spread, and not at all where the row is not tradable. At the close of row t + 1 the
account pays its financing, a margin call or a drawdown stop may close it, and its equity gives the
reward. The next observation is row t + 1. TorchTrading does the same on tensors.
"""

from __future__ import annotations

import struct
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import Info
from ml_pipeline.records import StateDict
from ml_pipeline.worlds.trading.account import (
    NO_FILL,
    Bar,
    fill,
    mark,
    view,
)
from ml_pipeline.worlds.trading.data.load import load_market, load_recipe
from ml_pipeline.worlds.trading.rewards import Moments, reward
from ml_pipeline.worlds.trading.task import N_DRAWS, JudgedOnBars, TradingTask, bar_of

BLOCK = 256  # rows that are read from the market at once


class Trading(JudgedOnBars, gym.Env[NDArray[np.float32], Any]):
    """Arguments are those of ``TradingSettings``; the account is closed at most once per episode.

    For equity curves and lists of trades, ``row``, ``account``, ``fill`` (the order at the open)
    and ``forced`` (the trades of a margin call or stop) describe the last step.
    ``reset(options={"row": 100, "symbol": "BTC"})`` starts at a given place. ``symbol`` can be set
    between episodes; the next reset applies it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, **settings: Any) -> None:
        self.task = task = TradingTask(settings)
        self._data = settings.get("data")
        # Evaluations read from it that every episode ends, and when at the latest.
        self.spec = EnvSpec("Trading-v0", max_episode_steps=task.n_steps)
        self.symbol = task.symbol
        self.observation_space = task.observation_space
        self.action_space = task.action_space
        self.row = task.first_row  # the last bar that the agent has seen
        self.column: int | slice = slice(None) if task.portfolio else 0  # of the symbols
        self.account = task.new_account()
        self.fill = self.forced = NO_FILL  # of the last step, at its open and at its close
        self._moments: Moments = (0.0, 0.0)
        self._n_steps = 0
        # Rows of the market from _first_row: bars, and observations that lack the account.
        self._first_row = 0
        self._bars: list[Bar] = []
        self._obs = np.zeros((BLOCK, *task.observation_space.shape), dtype=np.float32)
        self._rows = list(self._obs)  # views that are faster to pick than by an index
        self._n_features = self._obs.shape[1] - task.n_account
        # A fifth of the time that NumPy needs to write a few numbers.
        self._write = struct.Struct(f"{task.n_account}f").pack_into

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[NDArray[np.float32], Info]:
        super().reset(seed=seed)
        task, options = self.task, dict(options or {})
        draws = self.np_random.random(N_DRAWS).tolist()
        symbol = options.pop("symbol", self.symbol)
        row = options.pop("row", task.first_row + int(draws[0] * task.n_starts))
        if options:
            raise ValueError(f"reset takes the options row and symbol, got {', '.join(options)}")
        last = task.first_row + task.n_starts - 1
        if not task.first_row <= row <= last:
            raise ValueError(f"row={row}: an episode starts from row {task.first_row} to {last}")
        self.row = int(row)
        self._choose(symbol, draws[1])
        self.account = task.new_account()
        self.fill = self.forced = NO_FILL
        self._moments = (0.0, 0.0)
        self._n_steps = 0
        self._read()
        return self._observe(0), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, Info]:
        task, before, n_steps = self.task, self.account, self._n_steps + 1
        if before.is_closed or n_steps > task.n_steps:
            raise gym.error.ResetNeeded("the episode has ended; call reset")
        self._n_steps = n_steps
        self.row += 1
        index = self.row - self._first_row
        if index >= len(self._bars):
            self._read()
            index = 0
        bar = self._bars[index]
        m = task.m
        account, self.fill = fill(m, task.rules, before, task.target(action), bar)
        self.account, self.forced = account, _ = mark(m, task.rules, account, bar)
        gain, self._moments = reward(m, task.reward_rules, before, account, self._moments)
        is_closed, is_late = bool(account.is_closed), n_steps == task.n_steps
        info = task.outcome(account) if is_closed or is_late else {}
        return self._observe(index), float(gain), is_closed, is_late, info

    def get_state(self) -> StateDict:
        """Everything that a step changes; the market is not part of it."""
        names = ("symbol", "row", "column", "account", "fill", "forced", "_moments", "_n_steps")
        return {name: getattr(self, name) for name in names}

    def set_state(self, state: StateDict) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._read()

    def export_facts(self) -> dict[str, object]:
        """What an exported policy needs to see new bars as it saw those of its market."""
        if self._data is None:
            return {}
        last = load_market(period="all", **self._data).time[-1]
        return {"market": {"recipe": load_recipe(**self._data)._asdict(), "until": int(last)}}

    def _choose(self, symbol: str, draw: float) -> None:
        """Use this symbol, or the one that ``draw`` selects, in the coming episode."""
        if self.task.portfolio:
            if symbol != self.task.symbol:
                raise ValueError(f"symbol={symbol}: a portfolio holds every symbol")
            return
        number = self.task.symbol_number(symbol, seed=self.np_random_seed or 0)
        self.column = int(draw * len(self.task.market.symbols)) if number is None else number

    def _read(self) -> None:
        """Read the rows from the current one on: as floats, or as arrays for a portfolio."""
        task, first = self.task, self.row
        end = min(first + BLOCK, len(task.market.time))
        columns = bar_of(task.bars(first, end, self.column).swapaxes(0, 1))
        if task.portfolio:
            self._bars = [Bar(*row) for row in zip(*columns, strict=True)]
        else:
            self._bars = [*map(Bar._make, zip(*map(np.ndarray.tolist, columns), strict=True))]
        rows = task.market.feature[first + 1 - task.window : end, self.column]
        windows = np.lib.stride_tricks.sliding_window_view(rows, task.window, axis=0)
        # The window is the last axis: put it after the time.
        windows = np.moveaxis(windows, -1, 1).reshape(end - first, -1)
        self._obs[: end - first, : self._n_features] = windows
        self._first_row = first

    def _observe(self, index: int) -> NDArray[np.float32]:
        """As ``TradingTask.observation`` at ``_first_row + index``, but faster."""
        obs: NDArray[np.float32] = self._rows[index].copy()
        seen = view(self.task.m, self.task.rules, self.account)
        if self.task.portfolio:
            obs[self._n_features :] = np.concatenate(seen, axis=None)
        else:
            self._write(obs, 4 * self._n_features, *seen)  # type: ignore[arg-type]  # is a Buffer
        return obs
