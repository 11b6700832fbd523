"""AgentConfig: the settings that every algorithm shares; the base of each algorithm's own class."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ml_pipeline.config.checks import check


@dataclass
class AgentConfig:
    """Override the first two methods if an iteration is more than one step of each env."""

    algorithm: str = ""  # dotted path of an Algorithm; it chooses the class of these settings
    action_mask: str = "none"  # auto | none | info (key action_mask) | a key of a Dict observation

    @property
    def allows_nonfinite(self) -> bool:
        """Whether envs may return NaN or infinity; some algorithms have a setting for it."""
        return False

    @property
    def needs_box(self) -> str | None:
        """The key and value that make sense for Box actions only, or None."""
        return None

    @property
    def has_critic(self) -> bool:
        """Whether network.critic makes sense."""
        return False

    @property
    def needs_processes(self) -> str | None:
        """The key that does not work with tensor envs, and the value that does, or None."""
        return None

    def iteration_steps(self, n_envs: int) -> int:
        """Env steps of one iteration."""
        return n_envs

    def why_not(self, n_envs: int, *, recurrent: bool = False) -> str | None:
        """Why these sizes do not fit together, or None if they do."""
        return None

    def why_not_double(self) -> str | None:
        """Why the collector cannot be double-buffered, or None if it can."""
        return None

    def remark(self, env_steps: int) -> str | None:
        """What a user should know about a run of this length, or None."""
        return None

    def fitting_n_envs(self, n_envs: int, *, recurrent: bool = False) -> int:
        """The largest number up to ``n_envs`` that fits, or else the smallest above it."""
        candidates = itertools.chain(range(n_envs, 0, -1), itertools.count(n_envs + 1))
        return next(each for each in candidates if self.why_not(each, recurrent=recurrent) is None)

    def _check(self, fact: bool, name: str, rule: str) -> None:
        check(fact, f"agent.{name}", rule, getattr(self, name))

    def _check_schedule(self, name: str, more: tuple[str, ...] = ()) -> None:
        """A known name, or a dotted path, which ``find_schedule`` imports."""
        if "." not in str(getattr(self, name)):
            self._check_choice(name, ("constant", "linear", "cosine", *more))

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(getattr(self, name) in choices, name, " | ".join(choices))
