"""Batcher: runs a policy in its own thread, on the requests of many clients at once.

A request never waits for others to join it. A pass takes the requests that arrived during the last
pass; the first one takes those of the same turn of the event loop. All methods belong to that loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from itertools import chain
from typing import NamedTuple

import numpy as np

from ml_pipeline.deploy.exported import Arrays, ExportedPolicy
from ml_pipeline.deploy.request import Query, RefusedError

MAX_WAITING = 1_024  # requests


class _Waiting(NamedTuple):
    query: Query
    future: asyncio.Future[Arrays]
    deadline: float  # by time.monotonic


class Batcher:
    """``max_rows`` limits the observations in one pass; a request gets its answer or an error."""

    def __init__(
        self, policy: ExportedPolicy, *, max_rows: int, answer_seconds: float = 30.0
    ) -> None:
        self._policy = policy
        self._max_rows = max_rows
        self._answer_seconds = answer_seconds
        self._waiting: deque[_Waiting] = deque()
        self._running: list[_Waiting] = []
        self._is_due = False  # a pass runs, or starts in this turn of the loop
        self._began = 0.0
        self._passes: queue.SimpleQueue[list[_Waiting]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
        self._thread.start()

    def submit(self, query: Query) -> asyncio.Future[Arrays]:
        """The outputs of the policy, when they are ready; ``RefusedError`` if it cannot run now."""
        self._check_busy()
        if len(self._waiting) >= MAX_WAITING:
            raise RefusedError(503, f"{MAX_WAITING:,} requests are waiting; try again later")
        loop = asyncio.get_running_loop()
        each = _Waiting(query, loop.create_future(), time.monotonic() + self._answer_seconds)
        self._waiting.append(each)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._start)
        return each.future

    @property
    def busy_seconds(self) -> float:
        """The age of the running pass; 0 if there is none."""
        return time.monotonic() - self._began if self._running else 0.0

    def check(self) -> None:
        """Refuse if the policy's thread has ended, or exceeds its limit for one pass."""
        if not self._thread.is_alive():
            raise RefusedError(503, "the policy's thread has ended; restart the server")
        self._check_busy()

    def _check_busy(self) -> None:
        if (busy := self.busy_seconds) > self._answer_seconds:
            limit = f"the limit is {self._answer_seconds:g} s"
            raise RefusedError(503, f"the policy has not returned for {busy:.0f} s; {limit}")

    def expire(self) -> None:
        """Refuse the requests that have waited for too long."""
        now = time.monotonic()
        for each in chain(self._running, self._waiting):
            if now >= each.deadline and not each.future.done():
                reason = f"the policy did not answer within {self._answer_seconds:g} s"
                each.future.set_exception(RefusedError(503, reason))
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()

    def close(self) -> None:
        """End the policy's thread; one that is in a pass ends with the process."""
        self._passes.put([])
        if not self._running:
            self._thread.join()

    def _start(self) -> None:
        """Begin a pass with the requests that fit, in the order of their arrival."""
        batch: list[_Waiting] = []
        n_rows = 0
        while self._waiting and n_rows + self._waiting[0].query.n_rows <= self._max_rows:
            batch.append(self._waiting.popleft())
            n_rows += batch[-1].query.n_rows
        self._running, self._is_due, self._began = batch, bool(batch), time.monotonic()
        if batch:
            self._passes.put(batch)

    def _finish(self, answers: list[Arrays | Exception]) -> None:
        batch = self._running
        self._start()
        for each, answer in zip(batch, answers, strict=True):
            if each.future.done():
                continue  # expired
            if isinstance(answer, Exception):
                each.future.set_exception(answer)
            else:
                each.future.set_result(answer)

    def _serve(self) -> None:
        """The policy's thread."""
        while batch := self._passes.get():
            answers = self._answers([each.query for each in batch])
            loop = batch[0].future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._finish, answers)

    def _answers(self, queries: list[Query]) -> list[Arrays | Exception]:
        """One pass for all; if it fails, one per request, so that only the bad one fails."""
        try:
            return list(self._run(queries))
        except Exception as error:  # the policy's own code can raise anything
            if len(queries) == 1:
                return [error]
            return [answer for each in queries for answer in self._answers([each])]

    def _run(self, queries: list[Query]) -> list[Arrays]:
        if len(queries) == 1:
            return [self._policy.run(queries[0].inputs)]
        columns = {name: [each.inputs[name] for each in queries] for name in queries[0].inputs}
        outputs = self._policy.run({name: np.concatenate(each) for name, each in columns.items()})
        answers: list[Arrays] = []
        first = 0
        for query in queries:
            rows = slice(first, first + query.n_rows)
            answers.append({name: each[rows] for name, each in outputs.items()})
            first += query.n_rows
        return answers
