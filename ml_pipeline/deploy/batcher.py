"""Batcher: runs a policy in its own thread, on the waiting requests of many clients at once."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from ml_pipeline.deploy.exported import Arrays, ExportedPolicy
from ml_pipeline.deploy.request import Query

MAX_WAITING = 1_024  # requests
CLOSE_SECONDS = 5.0  # limit for the pass that runs when the batcher closes
_WAIT_SECONDS = 0.002  # for more requests to join a pass


class _Waiting(NamedTuple):
    query: Query
    future: Future[Arrays]


_STOP = _Waiting(Query({}, 0, False), Future())  # ends the policy's thread


class Batcher:
    """``max_rows`` limits the observations in one pass of the policy."""

    def __init__(
        self, policy: ExportedPolicy, *, max_rows: int, wait_seconds: float = _WAIT_SECONDS
    ) -> None:
        self._policy = policy
        self._max_rows = max_rows
        self._wait_seconds = wait_seconds
        self._waiting: queue.Queue[_Waiting] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, query: Query) -> Future[Arrays]:
        """The outputs of the policy, when they are ready; ``queue.Full`` if too many wait."""
        future: Future[Arrays] = Future()
        self._waiting.put_nowait(_Waiting(query, future))
        return future

    def close(self) -> None:
        try:
            self._waiting.put(_STOP, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # the policy is stuck; its daemon thread ends with the process
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        left: _Waiting | None = None
        while (first := left or self._waiting.get()) is not _STOP:
            batch, left = self._gather(first)
            self._answer(batch)

    def _gather(self, first: _Waiting) -> tuple[list[_Waiting], _Waiting | None]:
        """The requests that share a pass with ``first``, and one that did not fit."""
        batch, n_rows = [first], first.query.n_rows
        deadline = time.monotonic() + self._wait_seconds
        while n_rows < self._max_rows:
            try:
                each = self._waiting.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if each is _STOP or n_rows + each.query.n_rows > self._max_rows:
                return batch, each
            batch.append(each)
            n_rows += each.query.n_rows
        return batch, None

    def _answer(self, batch: list[_Waiting]) -> None:
        """One pass for all; if it fails, one per request, so that only the bad one fails."""
        try:
            self._run(batch)
        except Exception as error:  # the policy's own code can raise anything
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for each in batch:
                    self._answer([each])

    def _run(self, batch: list[_Waiting]) -> None:
        names = batch[0].query.inputs
        joined = {name: np.concatenate([q.inputs[name] for q, _ in batch]) for name in names}
        outputs = self._policy.run(joined)
        first = 0
        for query, future in batch:
            rows = slice(first, first + query.n_rows)
            future.set_result({name: each[rows] for name, each in outputs.items()})
            first += query.n_rows
