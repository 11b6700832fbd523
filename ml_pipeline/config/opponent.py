"""Self-play: who plays against the agent. Torch-free, like the rest of the schema."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

from ml_pipeline.config.checks import check, integer_steps

SAMPLINGS = ("latest", "uniform", "hard", "even")


@dataclass
class OpponentConfig:
    """A pool of the agent's past selves and scripted players; see docs/self_play.md."""

    add_every_steps: float = 50_000  # env steps after which a copy of the agent joins the pool
    # Such as 0.6: it joins only with this share of the points against the pool
    add_at_score: Optional[float] = None
    capacity: int = 20  # past selves; the oldest leaves
    # latest | uniform | hard: those who win, by (1 - score) ** power | even: score * (1 - score)
    sampling: str = "uniform"
    power: float = 2.0
    # Share of the games against the env's own players: +opponent.scripted.weak=0.2
    scripted: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = integer_steps("opponent.add_every_steps", self.add_every_steps)
        self.add_every_steps = every
        if self.add_at_score is not None:
            fits = 0 <= self.add_at_score <= 1
            check(fits, "opponent.add_at_score", "null, or between 0 and 1", self.add_at_score)
        check(self.capacity >= 1, "opponent.capacity", "at least 1", self.capacity)
        known = self.sampling in SAMPLINGS
        check(known, "opponent.sampling", " | ".join(SAMPLINGS), self.sampling)
        check(self.power > 0, "opponent.power", "positive", self.power)
        check_shares("opponent.scripted", self.scripted)


def check_shares(key: str, shares: dict[str, float]) -> None:
    """Each share is between 0 and 1, and so is their sum; past selves play the rest."""
    for name, share in shares.items():
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        check(is_number and 0 <= share <= 1, f"{key}.{name}", "between 0 and 1", share)
    total = math.fsum(shares.values())
    check(total <= 1 + 1e-9, key, "shares with a sum of at most 1", total)
