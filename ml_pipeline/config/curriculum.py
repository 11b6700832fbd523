"""The schema of a curriculum: phases of training, each with its own settings of the envs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from ml_pipeline.config.checks import check, integer_steps
from ml_pipeline.config.opponent import check_shares


@dataclass
class UntilConfig:
    """When a phase ends; the first goal that is reached counts."""

    n_episodes: Optional[float] = None  # episodes that ended in this phase
    env_steps: Optional[float] = None  # env steps of this phase, over all envs
    metric: Optional[str] = None  # any metric of metrics.csv
    threshold: Optional[float] = None  # the metric must be at or above it
    patience: int = 1  # values in a row

    @property
    def is_never(self) -> bool:
        return self.n_episodes is None and self.env_steps is None and self.metric is None


@dataclass
class PhaseConfig:
    """One phase; what it does not name stays as it was."""

    # Attributes of all envs, used from their next episode on
    env: dict[str, Any] = field(default_factory=dict)
    # With self-play: share of the games by name, as in {weak: 0.2}; past selves play the rest
    opponents: dict[str, float] = field(default_factory=dict)
    replay: str = "keep"  # keep | clear: forget the transitions of the phases before
    until: UntilConfig = field(default_factory=UntilConfig)


@dataclass
class CurriculumConfig:
    """Phases in their order; the last one lasts until the run ends."""

    phases: dict[str, PhaseConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("curriculum.phases is empty; name at least one phase")
        for name, phase in self.phases.items():
            key = f"curriculum.phases.{name}"
            check(phase.replay in ("keep", "clear"), f"{key}.replay", "keep | clear", phase.replay)
            check_shares(f"{key}.opponents", phase.opponents)
            _check_until(f"{key}.until", phase.until)
        *earlier, last = self.phases
        for name in earlier:
            if self.phases[name].until.is_never:
                raise ValueError(
                    f"curriculum.phases.{name}.until is empty, so phase {last} would never start; "
                    "set n_episodes, env_steps, or metric and threshold"
                )

    def settings_of(self, phase: str) -> dict[str, Any]:
        """The attributes of the envs in a phase, those of earlier phases included."""
        settings: dict[str, Any] = {}
        for name in self.names_until(phase):
            settings.update(self.phases[name].env)
        return settings

    def names_until(self, phase: str) -> list[str]:
        """The phases up to and including ``phase``."""
        names = list(self.phases)
        return names[: names.index(phase) + 1]


def _check_until(key: str, until: UntilConfig) -> None:
    for name in ("n_episodes", "env_steps"):
        if getattr(until, name) is not None:
            setattr(until, name, integer_steps(f"{key}.{name}", getattr(until, name)))
    check(until.patience >= 1, f"{key}.patience", "at least 1", until.patience)
    if (until.metric is None) != (until.threshold is None):
        missing = "threshold" if until.threshold is None else "metric"
        raise ValueError(f"{key}.{missing}=null: metric and threshold belong together; set both")
