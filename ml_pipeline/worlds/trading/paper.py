"""Paper trading: an exported policy walks new bars of market files with accounts on paper.

Its steps are those of the env Trading: an order that the policy decides after a bar fills at the
open of the next one. A bar is walked once every symbol has a bar at its time or later, so that a
file that is written late cannot change it. There is no broker and no network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.errors import first_line, type_and_line
from ml_pipeline.worlds.trading.account import NO_FILL, Account, Bar, Fill, Number, fill, mark
from ml_pipeline.worlds.trading.data.bars import Bars, text_of
from ml_pipeline.worlds.trading.data.files import market_files
from ml_pipeline.worlds.trading.data.layouts import FileFormat
from ml_pipeline.worlds.trading.data.load import Recipe, new_market, read_new_bars
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.paper_log import PaperError, PaperLog, Record
from ml_pipeline.worlds.trading.task import EACH, RANDOM, TradingTask, bar_of

LOG_FORMAT = 1
PORTFOLIO = "portfolio"  # the name of an account that holds every symbol

_LOOK_SECONDS = 0.25  # between two looks at files that may grow
_SYNC_BARS = 1_000  # bars of the past between two syncs; the newest bar is always synced
_NOT_LIVE = ("data", "period", "episode_bars", "random_start")  # settings of episodes
_ENVS = ("Trading", "TorchTrading")


@dataclass
class Book:
    """One account, what it holds and what the policy wants next."""

    name: str
    column: int | slice  # of the symbols of the market
    account: Account
    order: Number  # exposure in multiples of the equity, filled at the next open; None: closed
    memory: torch.Tensor | None  # of a recurrent policy


class Walked(NamedTuple):
    """Some bars that have been walked since the last ``Walked``."""

    n_bars: int
    n_fills: int
    record: Record  # of the last bar


class PaperPolicy:
    """An exported policy of a trading env, with what it needs to see new bars."""

    def __init__(self, policy: ExportedPolicy, path: Path | str) -> None:
        env, market = policy.metadata["env"], policy.metadata.get("market")
        kind = str(env.get("target")).rpartition(".")[2]
        if kind not in _ENVS or not isinstance(market, dict):
            fix = "export the run again" if kind in _ENVS else "use a policy of env=trading"
            raise PaperError(f"{path}: is a policy of {policy.env_name}, without a market; {fix}")
        if env.get("wrappers"):
            raise PaperError(
                f"{path}: its env has wrappers, {', '.join(env['wrappers'])}; paper trading has "
                "none, so train without them"
            )
        self.policy = policy
        try:
            self.recipe = Recipe(**market["recipe"])
            self.until = int(market["until"])  # the end of the bars that training may have seen
        except (KeyError, TypeError, ValueError) as error:
            raise PaperError(f"{path}: its market is damaged: {type_and_line(error)}") from error
        self.settings = {k: v for k, v in env["kwargs"].items() if k not in _NOT_LIVE}
        data = env["kwargs"].get("data") or {}
        self.files = {key: data[key] for key in FileFormat._fields if data.get(key) is not None}

    def task(self, market: Market) -> TradingTask:
        try:
            return TradingTask({**self.settings, "market": market, "random_start": False})
        except ValueError as error:
            raise PaperError(first_line(error)) from error

    def new_books(self, task: TradingTask) -> list[Book]:
        """One account for all symbols, for the symbol of the env, or for each symbol."""
        symbols = task.market.symbols
        if task.portfolio:
            columns: dict[str, int | slice] = {PORTFOLIO: slice(None)}
        elif task.symbol in (RANDOM, EACH):
            columns = {name: index for index, name in enumerate(symbols)}
        else:
            columns = {task.symbol: symbols.index(task.symbol)}
        return [
            Book(name, column, task.new_account(), 0.0, self.policy.new_memory(1))
            for name, column in columns.items()
        ]

    def decide(self, task: TradingTask, book: Book, row: int) -> None:
        """Let the policy choose the order of ``book`` after ``row``."""
        rows = task.market.feature[row + 1 - task.window : row + 1, book.column]
        obs = task.observation(rows, book.account)
        action = self.policy.act_batch(obs[None], memory=book.memory)[0]
        book.order = task.target(action)


class PaperWalk:
    """Walks the bars of ``path`` into ``log``; continues after its last bar."""

    def __init__(
        self, policy: PaperPolicy, path: str, log: PaperLog, *, start: int | None, **files: Any
    ) -> None:
        """``start``: the first bar ends after it; None: after the bars of the training data."""
        self._policy = policy
        self._path = path
        self._log = log
        self._start = policy.until if start is None else start
        self._files = {**policy.files, **files}
        self._books: list[Book] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether margin calls or stops have closed every account."""
        last = self._log.last
        return last is not None and all(each["order"] is None for each in last["accounts"].values())

    def walk(self) -> Iterator[Walked]:
        """Walk the bars that the files have now."""
        recipe = self._policy.recipe
        try:
            bars = read_new_bars(self._path, recipe, **self._files)
        except OSError as error:  # a file was removed, or may not be read
            raise PaperError(f"{self._path}: cannot be read: {first_line(error)}") from error
        whole = new_market(bars, recipe)
        latest = min(int(each.time[-1]) for each in bars.values())
        market = whole.rows(slice(0, int(np.searchsorted(whole.time, latest, side="right"))))
        task = self._policy.task(market)
        if self._log.last is None:
            row = self._first_row(task, bars)
            if row is None:
                return
            yield self._begin(task, row)
        n_bars = n_fills = 0
        for row in range(self._last_row(market, self._log.last or {}) + 1, len(market.time)):
            if self.is_closed:
                break
            n_fills += self._step(task, row)
            n_bars += 1
            if n_bars % _SYNC_BARS == 0:
                self._log.sync()
        self._log.sync()
        if n_bars and self._log.last is not None:
            yield Walked(n_bars, n_fills, self._log.last)

    def follow(self) -> Iterator[Walked]:
        """Walk the bars, now and whenever the files change."""
        seen = None
        while not self.is_closed:
            # Before reading: a change during the reading is noticed the next time.
            stamps = self._stamps()
            if stamps != seen:
                seen = stamps
                yield from self.walk()
            else:
                time.sleep(_LOOK_SECONDS)

    def _stamps(self) -> list[tuple[Path, int, int]]:
        """What changes whenever a file is written to."""
        try:
            found = [(path, path.stat()) for path in market_files(self._path)]
        except OSError as error:
            raise PaperError(f"{self._path}: cannot be read: {first_line(error)}") from error
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]

    def why_nothing(self) -> str:
        """Why no bar has been walked yet."""
        return (
            f"{self._path}: has no bar after {text_of(self._start)} for which every symbol has "
            f"{self._policy.recipe.n_bars} bars; add newer bars, or walk older ones with --start"
        )

    def _first_row(self, task: TradingTask, bars: dict[str, Bars]) -> int | None:
        """The first row after the start whose features no longer depend on the first bar."""
        n_bars, found = self._policy.recipe.n_bars, task.market.time
        if any(len(each.time) < n_bars for each in bars.values()):
            return None
        settled = max(int(each.time[n_bars - 1]) for each in bars.values())
        row = int(np.searchsorted(found, settled)) + task.window - 1
        row = max(row, int(np.searchsorted(found, self._start, side="right")))
        return row if row < len(found) else None

    def _last_row(self, market: Market, last: Record) -> int:
        """The row of the last bar in the log; refuses other bars than those it has seen."""
        row = int(np.searchsorted(market.time, last["ns"]))
        if row == len(market.time) or int(market.time[row]) != last["ns"]:
            raise PaperError(
                f"{self._path}: has no bar of {last['time']}, the last one in {self._log.path}; "
                "the data must continue the log: add the missing bars, or use another --log"
            )
        for symbol, seen, found in zip(
            market.symbols, last["close"], market.close[row].tolist(), strict=True
        ):
            if seen != found:
                raise PaperError(
                    f"{self._path}: {symbol} closed at {found:g} at {last['time']}, but at "
                    f"{seen:g} in {self._log.path}; bars must not change: write them when they end"
                )
        return row

    def _begin(self, task: TradingTask, row: int) -> Walked:
        """The first bar: accounts without positions, and their first orders."""
        self._books = self._policy.new_books(task)
        for book in self._books:
            self._policy.decide(task, book, row)
        self._log.append(_record(task, row, [(book, NO_FILL, NO_FILL) for book in self._books]))
        self._log.sync()
        return Walked(1, 0, self._log.last or {})

    def _step(self, task: TradingTask, row: int) -> int:
        """Fill the orders at the open of ``row``, mark the accounts, and decide the next orders."""
        if self._books is None:
            self._books = _restored(self._policy.new_books(task), task, self._log.last or {})
        done = []
        for book in self._books:
            filled = forced = NO_FILL
            if book.order is not None:
                bar = _bar(task, row, book.column)
                account, filled = fill(task.m, task.rules, book.account, book.order, bar)
                book.account, forced = mark(task.m, task.rules, account, bar)
                book.order = None
                if not book.account.is_closed:
                    self._policy.decide(task, book, row)
            done.append((book, filled, forced))
        record = _record(task, row, done)
        self._log.append(record)
        return sum(len(each["fills"]) for each in record["accounts"].values())


def _bar(task: TradingTask, row: int, column: int | slice) -> Bar:
    fields = bar_of(task.bars(row, row + 1, column)[0])
    return fields if task.portfolio else Bar(*map(_plain, fields))


def _record(task: TradingTask, row: int, done: list[tuple[Book, Fill, Fill]]) -> Record:
    """The line of a bar: everything that the next bar needs."""
    market = task.market
    when = int(market.time[row])
    accounts = {}
    for book, filled, forced in done:
        symbols = market.symbols if task.portfolio else (book.name,)
        order = None if book.order is None else np.atleast_1d(book.order).tolist()
        accounts[book.name] = {
            "fills": [*_fills(symbols, filled, "order"), *_fills(symbols, forced, "closed")],
            "order": None if order is None else dict(zip(symbols, order, strict=True)),
            **{name: _plain(value) for name, value in book.account._asdict().items()},
        }
        if book.memory is not None:
            accounts[book.name]["memory"] = book.memory.tolist()
    close = market.close[row].tolist()
    return {"time": text_of(when), "ns": when, "close": close, "accounts": accounts}


def _fills(symbols: tuple[str, ...], filled: Fill, why: str) -> list[Record]:
    names = ("symbol", "units", "price", "cost")
    trades = filled.trades(symbols)
    return [{**dict(zip(names, trade, strict=True)), "why": why} for trade in trades]


def _restored(books: list[Book], task: TradingTask, record: Record) -> list[Book]:
    """The accounts as the last line of a log has them."""
    for book in books:
        stored = record["accounts"][book.name]
        values = (stored[name] for name in Account._fields)
        book.account = Account(*(np.array(v) if isinstance(v, list) else v for v in values))
        order = stored["order"]
        if order is None:
            book.order = None
        elif task.portfolio:
            book.order = np.array(list(order.values()))
        else:
            book.order = order[book.name]
        if book.memory is not None:
            book.memory = torch.tensor(stored["memory"], dtype=torch.float32)
    return books


def _plain(value: Number) -> Number:
    """A value of NumPy as one of Python, for JSON and for fast arithmetic."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
