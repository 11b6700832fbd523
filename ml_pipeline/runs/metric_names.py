"""MetricNames: reports a config key that names a metric which nothing logs, early in the run."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.console import say


class MetricNames:
    """A logger that checks each name once, as soon as the metrics of its group are known.

    Metrics of ``eval/`` are known after the first evaluation, all others once an episode has
    ended. A callback may still log the metric later, so this is a remark and not an error.
    """

    def __init__(self, named: Mapping[str, str]) -> None:
        """``named``: the metric of each config key."""
        self._waiting = {
            key: metric for key, metric in named.items() if metric not in (EVAL_RETURN, MEAN_RETURN)
        }
        self._known: set[str] = set()

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        if not self._waiting:
            return
        self._known |= set(metrics)
        for key, metric in list(self._waiting.items()):
            if (EVAL_RETURN if metric.startswith("eval/") else MEAN_RETURN) not in self._known:
                continue
            del self._waiting[key]
            if metric not in self._known:
                close = get_close_matches(metric, sorted(self._known), n=1)
                hint = f"did you mean {close[0]}?" if close else "metrics.csv has all names"
                say(f"{key}={metric}: not logged by env step {env_steps:,}; {hint}")

    def close(self) -> None:
        """Nothing to close."""
