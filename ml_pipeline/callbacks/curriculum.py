"""Curriculum: trains in phases, each with its own settings of the envs.

The next phase starts in all envs at once, after the iteration in which the current one reaches its
goal. Each env uses the new settings from its next episode on.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Protocol

from ml_pipeline.config.curriculum import CurriculumConfig, PhaseConfig, UntilConfig
from ml_pipeline.envs.episode_stats import N_RECENT
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import PHASE
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.training.contracts import Callback, Forgets, RunningLoop


class Opponents(Protocol):
    """The opponents of a two-player env."""

    def set_mix(self, shares: Mapping[str, float]) -> None: ...


class Curriculum(Callback):
    """It must be the first callback: checkpoints then hold its decision about the iteration."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self.phase = next(iter(config.phases))
        self._first_step: int | None = None  # of the phase; None: the run has not started
        self._first_episode: int | None = None
        self._n_reached = 0  # values of the metric in a row that reached the threshold

    @property
    def number(self) -> int:
        """Of the current phase, from 1."""
        return len(self.config.names_until(self.phase))

    def on_train_start(self, loop: RunningLoop) -> None:
        is_resumed = self._first_step is not None
        if self._first_step is None:
            self._first_step = loop.env_steps
        # Also in a resumed run: its envs may be new, and a restarted worker needs the settings.
        self._apply(loop)
        say(f"curriculum: {'continues with' if is_resumed else 'starts with'} {self._shown()}")

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        metrics[PHASE] = self.number

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        # Not in on_iteration_end: a stop signal can skip that hook, and evaluations come after it.
        n_episodes = int(metrics.get("rollout/total_episodes", 0))
        if self._first_episode is None:
            self._first_episode = n_episodes - int(metrics.get("n_completed_episodes", 0))
        reached = self._reached(loop, metrics, n_episodes - self._first_episode)
        if not reached or self.number == len(self.config.phases):
            return
        self.phase = list(self.config.phases)[self.number]
        self._first_step, self._first_episode = loop.env_steps, n_episodes
        self._n_reached = 0
        if self._now.replay == "clear" and isinstance(loop.trainer, Forgets):
            loop.trainer.forget()
        self._apply(loop)  # last: it raises if a worker is lost, and a resumed run repeats it
        say(f"curriculum: {self._shown()} starts at env step {loop.env_steps:,}: {reached}")

    @property
    def _now(self) -> PhaseConfig:
        return self.config.phases[self.phase]

    def _shown(self) -> str:
        return f"phase {self.number} of {len(self.config.phases)}, {self.phase}"

    def _reached(self, loop: RunningLoop, metrics: Mapping[str, float], n_episodes: int) -> str:
        """The goal that the phase has reached, or an empty string."""
        until = self._now.until
        n_steps = loop.env_steps - (self._first_step or 0)
        if until.metric is not None and until.threshold is not None and until.metric in metrics:
            value = float(metrics[until.metric])
            counts = n_episodes >= N_RECENT or not _is_mean_of_recent(until)
            self._n_reached = self._n_reached + 1 if counts and value >= until.threshold else 0
            if self._n_reached >= until.patience:
                return f"{until.metric} {value:g} reached {until.threshold:g}"
        if until.n_episodes is not None and n_episodes >= until.n_episodes:
            return f"{n_episodes:,} episodes"
        if until.env_steps is not None and n_steps >= until.env_steps:
            return f"{n_steps:,} env steps"
        return ""

    def _apply(self, loop: RunningLoop) -> None:
        """Tell all envs the settings of the phase; they use them from their next reset on."""
        for env in loop.envs:
            # Not every VectorEnv has it, and a wrapper may pass it on by __getattr__.
            set_attr = getattr(env, "set_attr", None)
            if set_attr is None:
                raise UserError(f"curriculum: {type(env).__name__} has no set_attr; add it")
            for name, value in self.config.settings_of(self.phase).items():
                set_attr(name, [deepcopy(value) for _ in range(env.num_envs)])
        mixes = [self.config.phases[each].opponents for each in self.config.names_until(self.phase)]
        mix = next((each for each in reversed(mixes) if each), None)
        if mix is None:
            return
        opponents: Opponents | None = getattr(loop.envs[0], "opponents", None)
        assert opponents is not None, "a phase with opponents needs a two-player env"
        opponents.set_mix(dict(mix))

    def state_dict(self) -> StateDict:
        return {
            "phase": self.phase,
            "first_step": self._first_step,
            "first_episode": self._first_episode,
            "n_reached": self._n_reached,
        }

    def load_state_dict(self, state: StateDict) -> None:
        if state["phase"] not in self.config.phases:
            raise UserError(
                f"curriculum.phases: the run was in phase {state['phase']}, which is not in the "
                "config; keep its name"
            )
        self.phase = state["phase"]
        self._first_step, self._first_episode = state["first_step"], state["first_episode"]
        self._n_reached = state["n_reached"]


def _is_mean_of_recent(until: UntilConfig) -> bool:
    """Whether the metric may still contain episodes of the phase before."""
    metric = str(until.metric)
    return metric.endswith(f"_mean_{N_RECENT}") or metric.startswith("rollout/info/")
