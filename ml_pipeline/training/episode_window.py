"""EpisodeWindow: the episode statistics of a run, over the last iteration and the last 100."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ml_pipeline.protocols import Episode, Metrics, StateDict

_LENGTH = 100


class EpisodeWindow:
    """Counts the episodes of a run and keeps the latest."""

    def __init__(self) -> None:
        self.n_episodes = 0
        self._recent: deque[Episode] = deque(maxlen=_LENGTH)

    def add(self, episodes: Sequence[Episode]) -> Metrics:
        """Add the episodes that ended in one iteration; returns the metrics to log."""
        n_completed = sum(episode.n for episode in episodes)
        self._recent.extend(episodes)
        self.n_episodes += n_completed
        return {
            "n_completed_episodes": n_completed,
            **_means("", episodes),
            **_means("_mean_100", self._latest()),
            "rollout/total_episodes": self.n_episodes,
        }

    def _latest(self) -> list[Episode]:
        """The last 100 episodes, or a few more if only the mean of several is known."""
        latest: list[Episode] = []
        missing = _LENGTH
        for episode in reversed(self._recent):
            if missing <= 0:
                break
            latest.append(episode)
            missing -= episode.n
        return latest[::-1]

    def state_dict(self) -> StateDict:
        recent = [list(episode) for episode in self._recent]
        return {"n_episodes": self.n_episodes, "recent_episodes": recent}

    def load_state_dict(self, state: StateDict) -> None:
        self.n_episodes = state["n_episodes"]
        recent = [Episode(*episode) for episode in state["recent_episodes"]]
        if not all(isinstance(value, (int, float)) for episode in recent for value in episode):
            raise ValueError("recent_episodes must be numbers")
        self._recent.extend(recent)


def _means(suffix: str, episodes: Sequence[Episode]) -> Metrics:
    if not episodes:
        return {}
    returns, lengths, weights = zip(*episodes, strict=True)
    return {
        f"rollout/episode_return{suffix}": float(np.average(returns, weights=weights)),
        f"rollout/episode_length{suffix}": float(np.average(lengths, weights=weights)),
    }
