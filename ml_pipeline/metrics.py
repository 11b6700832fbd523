"""Names of the metrics that several modules read, and how texts show a return or a count.

Every name is ``group/name``. A config names other metrics: ``best_metric`` picks ``best.pt``,
``objective`` is maximised.
"""

from __future__ import annotations

EVAL_RETURN = "eval/episode_return"  # mean over the episodes of one evaluation
MEAN_RETURN = "rollout/episode_return_mean_100"  # mean over the last 100 training episodes
PHASE = "curriculum/phase"  # number of the phase of a curriculum, from 1


def shown_return(value: float) -> str:
    """A return as text; those of trading are far below 1."""
    return f"{value:.1f}" if abs(value) >= 10 or value % 1 == 0 else f"{value:.3g}"


def counted(number: int, noun: str) -> str:
    """``1 run``, ``2,000 runs``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
