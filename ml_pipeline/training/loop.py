"""Loop: runs a trainer. It counts iterations, calls callbacks, logs, stops, and saves its state.

On several ranks each has a loop, and all iterate, save and stop together. Rank 0 runs the
callbacks, so it alone decides when to save and when to stop. After each iteration the others wait
for its decision. When it saves, they hand over their envs and the state that is theirs alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from ml_pipeline.errors import UserError, last_line, place_of, type_and_line
from ml_pipeline.policy.nonfinite import network_fault
from ml_pipeline.ranks.world import ALONE, RankError, World
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import global_generators_state, set_global_generators_state
from ml_pipeline.signals import Hold, NoSignals, Signals
from ml_pipeline.training.checks import NonFiniteError, PartError, TrainingError, plain_number
from ml_pipeline.training.contracts import (
    Agent,
    Callback,
    DiffersOnRanks,
    KeepsFiles,
    Logger,
    Resizes,
    ResumesEpisodes,
    ShowsRollouts,
    Trainer,
)
from ml_pipeline.training.out_of_memory import ran_out_of_memory

# What rank 0 decides for all; the others send 0, and the maximum counts.
_CONTINUE, _STOP, _SAVE = 1, 2, 3


class Loop:
    """Runs ``trainer`` until the budget of env steps is spent or a callback asks to stop."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Sequence[Logger] = (),
        signals: Signals | None = None,
        saves_envs: bool = False,
        world: World = ALONE,
    ) -> None:
        """``saves_envs``: episodes can be saved and continued in another process."""
        self.trainer = trainer
        self.callbacks = dict(callbacks or {})
        self.loggers = list(loggers)
        self.iteration = 0
        self.env_steps = 0
        self.stop_reason: str | None = None
        self._world = world
        self._own_signals = signals or NoSignals()
        self._signals = world.agreed_signals(self._own_signals, self._agree)
        self._parts: tuple[int, list[StateDict]] = (0, [])  # of all ranks, at an iteration
        self.save_files: Callable[[], None] = lambda: None  # what each rank writes itself
        self._saves_envs = saves_envs
        self._total_steps: int | None = None
        self._unlogged: Metrics | None = None  # of an iteration that is counted, but not logged

    @property
    def agent(self) -> Agent:
        return self.trainer.agent

    @property
    def envs(self) -> Sequence[VectorEnv[Any, Any, Any]]:
        return self.trainer.envs

    def train(self, total_steps: int) -> None:
        """Iterate until ``env_steps`` reaches ``total_steps``."""
        self._total_steps = total_steps
        with self._signals.whole_run():
            for name, callback in self.callbacks.items():
                with _errors_of(f"callbacks.{name}"):
                    callback.on_train_start(self)
            try:
                while not self.is_last_iteration():
                    # A stop signal waits for the end of this block, but not for long.
                    with self._signals.transaction() as transaction:
                        metrics = self._iterate(transaction.hold)
                        transaction.commit()
                        for name, callback in self.callbacks.items():
                            with _errors_of(f"callbacks.{name}"):
                                answer = callback.on_iteration_end(self, metrics)
                            if isinstance(answer, (bool, np.bool_)) and not answer:
                                self.request_stop(f"callbacks.{name} returned False")
                        self._log()
            except KeyboardInterrupt:
                # The weights have changed, so the record must contain this iteration.
                self._log()
                raise
            except PartError:
                with suppress(PartError):  # the first error is raised
                    self._log()
                raise
            for name, callback in self.callbacks.items():
                with _errors_of(f"callbacks.{name}"):
                    callback.on_train_end(self)
            if self._world.rank == 0:
                self._world.expect_end()
                with suppress(RankError):  # the run is complete, whatever the others do
                    self._world.max([_STOP, 0])

    def _iterate(self, hold: Hold) -> Metrics:
        """One iteration, counted."""
        start = time.perf_counter()
        self.trainer.progress = min(self.env_steps / (self._total_steps or 1), 1.0)
        n_steps = self.trainer.iteration_steps
        try:
            with self._world.apart():
                metrics = self.trainer.train_episode_vectorized(hold)
        except TrainingError as error:
            line = f"iteration {self.iteration + 1}: {error}"
            is_of_loss = isinstance(error, NonFiniteError)
            if is_of_loss and (fault := network_fault(self.trainer.agent.greedy())):
                line += f". {fault}; look there first"
            raise TrainingError(line) from error
        except Exception as error:  # a user's loss or network may raise anything
            place = place_of(error)
            if isinstance(error, UserError) or ran_out_of_memory(error) or not place:
                raise
            what = type_and_line(error).removesuffix(place)
            raise PartError(f"iteration {self.iteration + 1}: {what}{place}") from error
        self.iteration += 1
        self.env_steps += n_steps
        seconds = time.perf_counter() - start
        self._unlogged = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            **metrics,
            "time/env_steps_per_second": n_steps / seconds,
            "time/iteration_seconds": seconds,
        }
        return self._unlogged

    def _log(self) -> None:
        """Log the last iteration, once, and let callbacks save what belongs to it."""
        with self._signals.shielded():
            if self._unlogged is None:
                return
            metrics = {name: plain_number(name, value) for name, value in self._unlogged.items()}
            self._unlogged = None
            for logger in self.loggers:
                with _errors_of(f"logger {type(logger).__name__}"):
                    logger.log(metrics, env_steps=self.env_steps)
            for name, callback in self.callbacks.items():
                with _errors_of(f"callbacks.{name}"):
                    callback.on_iteration_logged(self, metrics)

    def is_last_iteration(self) -> bool:
        """Whether training ends after the iteration that was counted last."""
        enough = self._total_steps is not None and self.env_steps >= self._total_steps
        return enough or self.stop_reason is not None

    def request_stop(self, reason: str) -> None:
        """End training after this iteration."""
        self.stop_reason = reason

    def resize(self, n_envs: int) -> int:
        """Train in about ``n_envs`` envs from the next iteration on; returns the actual number."""
        self._world.refuse(
            f"{self._world.name} cannot change n_envs to {n_envs} during a run; remove the "
            "callback that does it"
        )
        if not isinstance(self.trainer, Resizes):
            raise TypeError(f"{type(self.trainer).__name__} cannot change its number of envs")
        return self.trainer.resize(n_envs)

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Arrays of the last rollout, for histograms; empty if the trainer has none."""
        return self.trainer.last_rollout() if isinstance(self.trainer, ShowsRollouts) else {}

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would be complete: it may need files of all ranks."""
        return self._world.is_reachable or not isinstance(self.trainer, KeepsFiles)

    def env_snapshots(self) -> list[bytes] | None:
        """The envs of all ranks as bytes, or None if they cannot be saved now; rank 0 calls it."""
        if not self._world.is_reachable:
            return None
        self._world.max([_SAVE, 0])
        parts = self._world.parts(self._own_part)
        if not parts:
            return self._own_snapshots()
        self._parts = self.iteration, [state for _, state in parts]
        for snapshots, _ in parts:
            if isinstance(snapshots, Exception):
                raise snapshots
        saved = [each for each, _ in parts if isinstance(each, list)]
        if len(saved) < len(parts):
            return None
        return [snapshot for each in saved for snapshot in each]

    def _own_snapshots(self) -> list[bytes] | None:
        if not self._saves_envs or not isinstance(self.trainer, ResumesEpisodes):
            return None
        return self.trainer.env_snapshots()

    def _own_part(self) -> tuple[list[bytes] | Exception | None, StateDict]:
        """The envs of this rank, or the error of saving them, and the state that is its own."""
        try:
            self.save_files()
        except UserError as error:
            return error, {}
        own = self._own_entries()
        try:
            return self._own_snapshots(), own
        except Exception as error:  # an env may raise anything; rank 0 reports it
            return RuntimeError(f"rank {self._world.rank}: {last_line(error)}"), own

    def _own_entries(self) -> StateDict:
        """The part of the state that differs between ranks."""
        own = self.trainer.own_state() if isinstance(self.trainer, DiffersOnRanks) else {}
        return {**own, "global_generators": global_generators_state()}

    def _agree(self) -> int:
        """Wait for the decision of rank 0; returns the number of a signal that any rank got."""
        decision = 0
        if self._world.rank == 0:
            decision = _CONTINUE if self.stop_reason is None else _STOP
        while True:
            decided, number = self._world.max([decision, self._own_signals.pending])
            if decided != _SAVE:
                break
            self._world.parts(self._own_part)
        if decided == _STOP and self.stop_reason is None:
            self.request_stop("rank 0 stopped")
        return number

    def wait_for_end(self) -> None:
        """On ranks other than 0, after the last iteration, until rank 0 has saved."""
        self._world.expect_end()
        with suppress(RankError):  # rank 0 was stopped by a signal and has left
            self._agree()

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        if not isinstance(self.trainer, ResumesEpisodes):
            raise ValueError(f"{type(self.trainer).__name__} cannot continue saved episodes")
        self.trainer.resume_episodes(state, snapshots)

    def state_dict(self) -> StateDict:
        """Everything that a resumed run continues from; on several ranks the state of all."""
        iteration, parts = self._parts
        state = self._own_state()
        return {**state, "ranks": parts} if parts and iteration == self.iteration else state

    def _own_state(self) -> StateDict:
        return {
            **self.trainer.state_dict(),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "global_generators": global_generators_state(),
            "callbacks": {name: each.state_dict() for name, each in self.callbacks.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        set_global_generators_state(state["global_generators"])
        self.trainer.load_state_dict(state)
        self.iteration = state["iteration"]
        self.env_steps = state["env_steps"]
        for name, callback_state in state["callbacks"].items():
            if name in self.callbacks:  # a resumed run may have fewer or other callbacks
                self.callbacks[name].load_state_dict(callback_state)


@contextmanager
def _errors_of(part: str) -> Iterator[None]:
    """Raise an error of a user's part with its name, file and line."""
    try:
        yield
    except Exception as error:  # it may raise anything
        if isinstance(error, UserError) or ran_out_of_memory(error):
            raise
        place = place_of(error)
        what = type_and_line(error).removesuffix(place)
        raise PartError(f"{part}: {what}{place}") from error


def state_of_rank(state: StateDict, world: World) -> tuple[StateDict, list[StateDict]]:
    """The state of a checkpoint for this rank, and the parts of the ranks that saved it.

    With another number of ranks it is the state of rank 0. ``n_ranks`` counts the parts. The
    checkpoint of one process has no key ``ranks``.
    """
    parts: list[StateDict] = state.get("ranks", [{}])
    own = parts[0] if world.misfit(len(parts)) else parts[world.rank]
    rest = {name: value for name, value in state.items() if name != "ranks"}
    merged = {
        name: {**rest[name], **value} if isinstance(value, dict) and name in rest else value
        for name, value in own.items()
    }
    return {**rest, **merged, "n_ranks": len(parts)}, parts
