"""Loop: runs a trainer. It counts iterations, calls callbacks, logs, stops, and saves its state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from ml_pipeline.protocols import (
    Agent,
    Callback,
    Logger,
    Metrics,
    Resizes,
    ResumesEpisodes,
    ShowsRollouts,
    StateDict,
    Trainer,
)
from ml_pipeline.seeding import global_generators_state, set_global_generators_state
from ml_pipeline.signals import NoSignals, StopSignals
from ml_pipeline.training.checks import TrainingError, plain_number


class Loop:
    """Runs ``trainer`` until the budget of env steps is spent or a callback asks to stop."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Sequence[Logger] = (),
        signals: StopSignals | NoSignals | None = None,
        saves_envs: bool = False,
    ) -> None:
        """``saves_envs``: episodes can be saved and continued in another process."""
        self.trainer = trainer
        self.callbacks = dict(callbacks or {})
        self.loggers = list(loggers)
        self.iteration = 0
        self.env_steps = 0
        self.stop_reason: str | None = None
        self._signals = signals or NoSignals()
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
        callbacks = list(self.callbacks.values())
        for callback in callbacks:
            callback.on_train_start(self)
        try:
            while not self.is_last_iteration():
                # A stop signal waits for the end of this block, but not for long.
                with self._signals.transaction() as transaction:
                    metrics = self._iterate(transaction.hold)
                    transaction.commit()
                    for callback in callbacks:
                        callback.on_iteration_end(self, metrics)
                    self._log()
        except KeyboardInterrupt:
            # The weights have changed, so the record must contain this iteration.
            self._log()
            raise
        for callback in callbacks:
            callback.on_train_end(self)

    def _iterate(self, hold: Any) -> Metrics:
        """One iteration, counted."""
        start = time.perf_counter()
        self.trainer.progress = min(self.env_steps / (self._total_steps or 1), 1.0)
        n_steps = self.trainer.iteration_steps
        try:
            metrics = self.trainer.train_episode_vectorized(hold)
        except TrainingError as error:
            raise TrainingError(f"iteration {self.iteration + 1}: {error}") from error
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
                logger.log(metrics, env_steps=self.env_steps)
            for callback in self.callbacks.values():
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
        if not isinstance(self.trainer, Resizes):
            raise TypeError(f"{type(self.trainer).__name__} cannot change its number of envs")
        return self.trainer.resize(n_envs)

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Arrays of the last rollout, for histograms; empty if the trainer has none."""
        return self.trainer.last_rollout() if isinstance(self.trainer, ShowsRollouts) else {}

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes, or None if they cannot be saved now."""
        if not self._saves_envs or not isinstance(self.trainer, ResumesEpisodes):
            return None
        return self.trainer.env_snapshots()

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        if not isinstance(self.trainer, ResumesEpisodes):
            raise ValueError(f"{type(self.trainer).__name__} cannot continue saved episodes")
        self.trainer.resume_episodes(state, snapshots)

    def state_dict(self) -> StateDict:
        """Everything that a resumed run continues from."""
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
