"""Names of the metrics that several modules read; every name is ``group/name``.

A config names other metrics: ``best_metric`` picks ``best.pt``, ``objective`` is maximised.
"""

from __future__ import annotations

EVAL_RETURN = "eval/episode_return"  # mean over the episodes of one evaluation
MEAN_RETURN = "rollout/episode_return_mean_100"  # mean over the last 100 training episodes
PHASE = "curriculum/phase"  # number of the phase of a curriculum, from 1
