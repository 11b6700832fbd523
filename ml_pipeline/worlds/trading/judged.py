"""JudgedOnBars: trading runs are selected, and deployed, by bars that none was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

VALIDATION = "validation"


class JudgedOnBars:
    """The base of both trading envs; a ``JudgedEnv``."""

    judge_command: ClassVar[str] = "judge"
    judge: ClassVar[str] = "ml_pipeline.worlds.trading.judge.facts_for_deployment"

    @classmethod
    def why_not_select(cls, kwargs: Mapping[str, object]) -> str | None:
        """Why a study must not select trials by these bars: those of train and test."""
        period = kwargs.get("period", "train")
        if period == VALIDATION:
            return None
        return (
            f"eval_env.kwargs.period={period}: a study selects trials by their evaluations, and "
            "the test period must stay unseen; add +eval_env.kwargs.period=validation"
        )
