"""TorchTrading: Trading as a tensor env, thousands of accounts over one copy of the market.

Its arithmetic is that of Trading, in float64, so MPS is refused. Every account starts at its own
row and symbol. Beside the market an account needs 149 bytes, and 32 for each further asset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv
from ml_pipeline.worlds.trading.account import (
    Account,
    Bar,
    fill,
    mark,
    open_account,
    view,
    within_limit,
)
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.rewards import reward
from ml_pipeline.worlds.trading.task import EACH, N_DRAWS, JudgedOnBars, TradingTask, bar_of


class Tensors:
    """The mathematics of ``trading_account`` for tensors [N, A], or [N, 1] for one number each."""

    log, log1p = staticmethod(torch.log), staticmethod(torch.log1p)

    @staticmethod
    def where(condition: Tensor, yes: Tensor | float, no: Tensor | float) -> Tensor:
        if isinstance(yes, float) and isinstance(no, float):
            return no + (yes - no) * condition.to(torch.float64)  # torch.where: float32
        return torch.where(condition, yes, no)

    @staticmethod
    def total(value: Tensor) -> Tensor:
        return value.sum(dim=-1, keepdim=True)

    @staticmethod
    def none(condition: Tensor) -> bool:
        return False  # reading the condition would wait for the device


TENSORS = Tensors()


class TorchTrading(JudgedOnBars, TorchVectorEnv):
    """State: row and symbol [n_envs], the fields of Account, mean and mean square of the returns.

    Arguments are those of ``TradingSettings``. With ``symbol=each`` env i trades symbol
    (seed + i) modulo the number of symbols.
    """

    n_draws = N_DRAWS

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        if torch.device(device).type == "mps":
            raise ValueError("device=mps: MPS has no float64, which money needs; use device=cpu")
        self.task = task = TradingTask(settings)
        market = task.market
        self.single_observation_space = task.observation_space
        self.single_action_space = task.action_space
        self.max_episode_steps = task.n_steps
        self._n_symbols = len(market.symbols)
        bars = torch.from_numpy(task.bars(0, len(market.time), slice(None)))
        self._bars = bars.transpose(1, 2).contiguous().to(device)  # [T, S, 6]
        self._features = torch.from_numpy(market.feature.copy()).to(device)  # [T, S, F]
        self._before = torch.arange(1 - task.window, 1, device=device)  # rows of a window
        self._positions = torch.tensor(task.positions or (), dtype=torch.float64, device=device)
        super().__init__(num_envs, device=device, seed=seed)

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        row_draw, symbol_draw = (draw.to(torch.float64) for draw in draws)
        row = self.task.first_row + (row_draw * self.task.n_starts).to(torch.int64)
        number = self.task.symbol_number(self.task.symbol, seed=0)
        if self.task.symbol == EACH:
            symbol = self.seeds % self._n_symbols
        elif number is None:
            symbol = (symbol_draw * self._n_symbols).to(torch.int64)
        else:
            symbol = torch.full_like(row, number)
        zero = torch.zeros_like(row_draw)[:, None]
        none = zero.expand(-1, self.task.n_assets)
        return (row, symbol, *open_account(self.task.rules, none, zero), zero, zero)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        row, symbol, *parts, mean, square = state
        task, before = self.task, Account(*parts)
        row = row + 1
        bar = self._bar(row, symbol)
        account, _ = fill(TENSORS, task.rules, before, self._target(action), bar)
        account, _ = mark(TENSORS, task.rules, account, bar)
        gain, moments = reward(TENSORS, task.reward_rules, before, account, (mean, square))
        after = (row, symbol, *account, *moments)
        return after, gain[:, 0].to(torch.float32), account.is_closed[:, 0]

    def observe(self, state: EnvState) -> Tensor:
        row, symbol, *parts, _, _ = state
        rows = row[:, None] + self._before
        if self.task.portfolio:
            features = self._features[rows]
        else:
            features = self._features[rows, symbol[:, None]]
        seen = torch.cat(view(TENSORS, self.task.rules, Account(*parts)), dim=1)
        return torch.cat((features.flatten(1), seen.to(torch.float32)), dim=1)

    def outcome(self, state: EnvState) -> dict[str, Tensor]:
        told = self.task.outcome(Account(*state[2:-2]))
        return {name: value[:, 0] for name, value in told.items()}

    @classmethod
    def single_env(cls, **kwargs: Any) -> Trading:
        return Trading(**kwargs)

    def _bar(self, row: Tensor, symbol: Tensor) -> Bar:
        if self.task.portfolio:
            return bar_of(self._bars[row].unbind(-1))
        return bar_of(self._bars[row, symbol][:, None].unbind(-1))

    def _target(self, action: Tensor) -> Tensor:
        """The wanted exposure [N, A], in multiples of the equity."""
        rules = self.task.rules
        if self.task.positions is None:
            share = action.to(torch.float64).clamp(self.task.low, 1.0)
        else:
            share = self._positions[action.reshape(len(action), -1)]
        if self.task.portfolio:
            share = within_limit(TENSORS, share)
        return share * rules.leverage
