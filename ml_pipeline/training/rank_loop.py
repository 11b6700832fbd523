"""RankLoop: a ``Loop`` on each of several ranks, which iterate, save and stop together.

Rank 0 runs the callbacks, so it alone decides when to save and when to stop. After each iteration
the other ranks wait for its decision. When it saves a checkpoint, they hand over their envs and
write their own transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ml_pipeline.distributed import RankError, World
from ml_pipeline.errors import UserError, last_line
from ml_pipeline.protocols import KeepsReplay, Metrics, StateDict, Trainer
from ml_pipeline.signals import Interrupted, NoSignals, StopSignals, Transaction
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.rank_replay import own_replay

# What rank 0 tells the others; they send 0, and the maximum counts.
_CONTINUE, _STOP, _SAVE = 1, 2, 3
# The state that differs between ranks.
_OWN_STATE = ("collector", "scaler", "positions", "replay", "global_generators")
_SHARED_REPLAY = ("priorities", "top_priority")  # equal on all ranks


class RankLoop(Loop):
    """All ranks must have made the same number of iterations."""

    def __init__(
        self, trainer: Trainer, *, world: World, signals: StopSignals | NoSignals, **options: Any
    ) -> None:
        super().__init__(trainer, signals=signals, **options)
        self._world = world
        self._plain_signals = signals
        self._signals = _AgreedSignals(signals, self._agree)  # type: ignore[assignment]
        self._others: tuple[int, list[StateDict]] | None = None  # at the iteration of a save
        self._is_iterating = False
        self.save_files: Callable[[], None] = lambda: None  # what this rank saves itself

    def train(self, total_steps: int) -> None:
        # One rank must not stop between two agreements: the others would wait for it.
        with self._plain_signals.shielded():
            super().train(total_steps)
            if self._world.rank == 0:
                self._world.expect_end()
                with suppress(RankError):  # the run is complete, whatever the others do
                    self._world.max([_STOP, 0])

    def _iterate(self, hold: Any) -> Metrics:
        self._is_iterating = True
        metrics = super()._iterate(hold)
        self._is_iterating = False
        return metrics

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would be complete: the replay of all ranks is part of it."""
        return not (self._is_iterating and isinstance(self.trainer, KeepsReplay))

    def _agree(self) -> int:
        """Wait for the decision of rank 0; returns the number of a signal that any rank got."""
        decision = 0
        if self._world.rank == 0:
            decision = _CONTINUE if self.stop_reason is None else _STOP
        while True:
            told, number = self._world.max([decision, self._plain_signals.pending])
            if told != _SAVE:
                break
            self._world.gathered(self._own_part())
        if told == _STOP and self.stop_reason is None:
            self.request_stop("rank 0 stopped")
        return number

    def wait_for_end(self) -> None:
        """On ranks other than 0, after the last iteration, until rank 0 has saved."""
        self._world.expect_end()
        try:
            self._agree()
        except RankError:
            return  # rank 0 was stopped by a signal and has left

    def _own_part(self) -> tuple[list[bytes] | Exception | None, StateDict]:
        """The envs of this rank, or the error of saving them, and the state that is its own."""
        try:
            self.save_files()
        except UserError as error:
            return error, {}
        state = super().state_dict()
        own = {name: state[name] for name in _OWN_STATE if name in state}
        if "replay" in own:
            own["replay"] = {k: v for k, v in own["replay"].items() if k not in _SHARED_REPLAY}
        try:
            return super().env_snapshots(), own
        except Exception as error:  # an env may raise anything; rank 0 reports it
            return RuntimeError(f"rank {self._world.rank}: {last_line(error)}"), own

    def env_snapshots(self) -> list[bytes] | None:
        """The envs of all ranks, in their order; only rank 0 calls this."""
        if self._is_iterating:
            return None  # the others do not wait for a decision
        self._world.max([_SAVE, 0])
        snapshots, states = zip(*self._world.gathered(self._own_part()), strict=True)
        self._others = self.iteration, list(states)
        all_snapshots: list[bytes] = []
        for part in snapshots:
            if isinstance(part, Exception):
                raise part
            if part is None:
                return None
            all_snapshots += part
        return all_snapshots

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        if self._others is None or self._others[0] != self.iteration:
            return state
        return {**state, "ranks": self._others[1]}

    def resize(self, n_envs: int) -> int:
        raise UserError(
            f"n_envs={n_envs}: {self._world.size} ranks cannot change their number of envs during "
            "a run; remove the callback that does it"
        )


class _AgreedSignals:
    """A stop signal of any rank stops all of them after the same iteration."""

    def __init__(self, signals: StopSignals | NoSignals, agree: Any) -> None:
        self._signals = signals
        self._agree = agree
        self.shielded = signals.shielded

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A stop signal waits until the ranks agree after an iteration, without a limit."""
        try:
            yield Transaction()
            number = self._agree()
        except RankError:
            self._signals.dismiss()  # torchrun ends the others when one has failed
            raise
        if number:
            self._signals.dismiss()  # this rank may get the signal later than another one
            raise Interrupted(number)


def own_state(state: StateDict, world: World) -> StateDict:
    """The state of a checkpoint for this rank; with another number of ranks that of rank 0.

    ``n_ranks`` is the number of ranks that saved it. That of one process has no key ``ranks``.
    """
    states = state.get("ranks", [{}])
    own = states[world.rank] if len(states) == world.size else states[0]
    rest = {name: value for name, value in state.items() if name != "ranks"}
    replay = own_replay(rest, states, world) if "replay" in rest else {}
    return {**rest, **own, **replay, "n_ranks": len(states)}
