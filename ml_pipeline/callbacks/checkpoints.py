"""Checkpoints: saves the latest state of a run, and the best one by ``best_metric``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ml_pipeline.callbacks.evaluation import PeriodicEvaluation
from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import check
from ml_pipeline.errors import UserError, one_line
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, shown_return
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import (
    BEST,
    checkpoint_path,
    finalist_name,
    finalist_steps,
    link_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ml_pipeline.runs.console import say
from ml_pipeline.runs.resuming import save_latest
from ml_pipeline.runs.run_folder import RunFolder, remove
from ml_pipeline.training.contracts import RunningLoop


class Finalist(NamedTuple):
    """A checkpoint that may be the best; a newer one wins a tie."""

    value: float
    env_steps: int


class Checkpoints(EverySteps):
    """Saves ``latest`` every ``every_steps`` and at the end, and ``best`` by ``best_metric``.

    During a run, ``best`` is the checkpoint with the highest value, and a newer one wins a tie. At
    the end, the best ``finalists`` checkpoints play ``final_episodes`` new episodes each, and
    ``best`` becomes the winner. ``finalists`` 1 leaves this out, and so does a run without
    evaluation.

    ``keep``: also save each ``latest`` as step_<env steps>, and keep the last ``keep`` of these.
    """

    def __init__(
        self,
        run: RunFolder,
        every_steps: float = 10_000,
        keep: int = 0,
        finalists: int = 3,
        final_episodes: int = 20,
        best_metric: str = EVAL_RETURN,
        load_policy: Callable[[str], Policy] | None = None,
    ) -> None:
        """``load_policy`` takes the name of a checkpoint; None: no finalist plays."""
        super().__init__("every_steps", every_steps)
        check(type(keep) is int and keep >= 0, "keep", "an integer of at least 0", keep)
        for key, number in (("finalists", finalists), ("final_episodes", final_episodes)):
            check(type(number) is int and number >= 1, key, "an integer of at least 1", number)
        self.run = run
        self.keep = keep
        self.best_metric = best_metric
        self.best_value = -math.inf
        self.finalists: list[Finalist] = []  # the best first
        self._most_finalists = finalists
        self._final_episodes = final_episodes
        self._load_policy = load_policy
        self._episodes_end = False  # whether an episode of training has ended

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        self._episodes_end |= MEAN_RETURN in metrics
        value = metrics.get(self.best_metric, math.nan)
        if not math.isnan(value):
            self._compete(Finalist(value, loop.env_steps), loop)
        if self.is_due(loop):
            save_latest(self.run, loop, keep=self.keep)
            self._sweep()  # only now: a run that resumes from the older latest needs the older ones

    def _compete(self, new: Finalist, loop: RunningLoop) -> None:
        """Save a checkpoint that is the best or a finalist."""
        is_best = new.value >= self.best_value
        self.best_value = max(self.best_value, new.value)
        if self._most_finalists == 1:
            if is_best:
                save_checkpoint(self.run, BEST, loop.state_dict())
            return
        ranked = sorted([*self.finalists, new], key=_rank, reverse=True)
        self.finalists = ranked[: self._most_finalists]
        if new in self.finalists:
            save_checkpoint(self.run, finalist_name(new.env_steps), loop.state_dict())
        if is_best:
            link_checkpoint(self.run, finalist_name(new.env_steps), BEST)

    def _sweep(self) -> None:
        kept = [each.env_steps for each in self.finalists]
        for steps in finalist_steps(self.run):
            if steps not in kept:
                remove(checkpoint_path(self.run, finalist_name(steps)))

    def on_train_end(self, loop: RunningLoop) -> None:
        # A run without evaluation intends to have no best checkpoint; another metric may be a typo.
        if self.best_value == -math.inf and self.best_metric != EVAL_RETURN:
            say(f"best_metric={self.best_metric}: no iteration logged it, so best.pt was not saved")
        if len(self.finalists) > 1 and self._load_policy is not None:
            self._play_final(loop, self._load_policy)
        self.finalists = []
        self._sweep()

    def _play_final(self, loop: RunningLoop, load_policy: Callable[[str], Policy]) -> None:
        """Let the finalists play the same new episodes; the winner becomes ``best``."""
        evaluations = [e for e in loop.callbacks.values() if isinstance(e, PeriodicEvaluation)]
        results: list[Finalist] = []
        try:
            for each in self.finalists if evaluations else ():
                metrics = evaluations[0].play_final(
                    load_policy(finalist_name(each.env_steps)),
                    loop,
                    n_episodes=self._final_episodes,
                    episodes_end=self._episodes_end,
                )
                if self.best_metric not in metrics:
                    return  # a metric of training, which new episodes cannot measure
                results.append(Finalist(metrics[self.best_metric], each.env_steps))
        except UserError as error:  # the run is complete, so it must not fail now
            say(f"best.pt: the finalists could not play: {one_line(error)}")
            return
        if not results:
            return
        results.sort(key=_rank, reverse=True)
        link_checkpoint(self.run, finalist_name(results[0].env_steps), BEST)
        (best, *others) = (f"{each.env_steps:,} ({shown_return(each.value)})" for each in results)
        say(
            f"best.pt: env step {best}, by {self.best_metric} in {self._final_episodes} more "
            f"episodes; others: {', '.join(others)}"
        )

    def state_dict(self) -> StateDict:
        finalists = [[each.value, each.env_steps] for each in self.finalists]
        state = {"best_return": self.best_value, "best_metric": self.best_metric}
        return {**state, "finalists": finalists}

    def load_state_dict(self, state: StateDict) -> None:
        # The maximum of another metric is not comparable.
        if state.get("best_metric", EVAL_RETURN) != self.best_metric:
            return
        self.best_value = state["best_return"]
        for value, env_steps in state.get("finalists", [])[: self._most_finalists]:
            if self._has(int(env_steps)):
                self.finalists.append(Finalist(float(value), int(env_steps)))

    def _has(self, env_steps: int) -> bool:
        """Whether a finalist is on disk; the end of a run leaves only ``best``, the winner."""
        name = finalist_name(env_steps)
        if checkpoint_path(self.run, name).is_file():
            return True
        try:
            if load_checkpoint(self.run, BEST)["env_steps"] != env_steps:
                return False
        except UserError:  # there is none, or it is damaged
            return False
        link_checkpoint(self.run, BEST, name)
        return True


def _rank(finalist: Finalist) -> tuple[float, int]:
    value = -math.inf if math.isnan(finalist.value) else finalist.value
    return value, finalist.env_steps
