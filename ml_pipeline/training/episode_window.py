"""EpisodeWindow: the episode statistics of a run, over the last iteration and the last 100.

Numbers in final infos are averaged over the last 100 episodes: ``rollout/info/is_success``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ml_pipeline.envs.episode_stats import MAX_INFOS, Episode, info_means
from ml_pipeline.records import Metrics, StateDict

N_RECENT = 100


class EpisodeWindow:
    """Counts the episodes of a run and keeps the latest."""

    def __init__(self) -> None:
        self.n_episodes = 0
        self._recent: deque[Episode] = deque(maxlen=N_RECENT)
        self._info_names: list[str] = []  # of the infos that are logged

    def add(self, episodes: Sequence[Episode]) -> Metrics:
        """Add the episodes that ended in one iteration; returns the metrics to log."""
        n_completed = sum(episode.n for episode in episodes)
        self._recent.extend(episodes)
        self.n_episodes += n_completed
        latest = self._latest()
        return {
            "n_completed_episodes": n_completed,
            **_means("", episodes),
            **_means("_mean_100", latest),
            "rollout/total_episodes": self.n_episodes,
            **self._infos(episodes, latest),
        }

    def _infos(self, new: Sequence[Episode], latest: Sequence[Episode]) -> Metrics:
        names = dict.fromkeys([*self._info_names, *(name for each in new for name in each.infos)])
        self._info_names = list(names)[:MAX_INFOS]
        means = info_means(latest, self._info_names)
        return {f"rollout/info/{name}": mean for name, mean in means.items()}

    def _latest(self) -> list[Episode]:
        """The last 100 episodes, or a few more if only the mean of several is known."""
        latest: list[Episode] = []
        missing = N_RECENT
        for episode in reversed(self._recent):
            if missing <= 0:
                break
            latest.append(episode)
            missing -= episode.n
        return latest[::-1]

    def state_dict(self) -> StateDict:
        recent = [[*each[:3], *([dict(each.infos)] if each.infos else [])] for each in self._recent]
        state = {"n_episodes": self.n_episodes, "recent_episodes": recent}
        return {**state, "info_names": self._info_names} if self._info_names else state

    def load_state_dict(self, state: StateDict) -> None:
        self.n_episodes = state["n_episodes"]
        recent = [Episode(*episode) for episode in state["recent_episodes"]]
        numbers = [value for each in recent for value in (*each[:3], *each.infos.values())]
        if not all(isinstance(value, (int, float)) for value in numbers):
            raise ValueError("recent_episodes must be numbers")
        self._recent.extend(recent)
        self._info_names = list(state.get("info_names", []))


def _means(suffix: str, episodes: Sequence[Episode]) -> Metrics:
    if not episodes:
        return {}
    returns, lengths, weights, _ = zip(*episodes, strict=True)
    return {
        f"rollout/episode_return{suffix}": float(np.average(returns, weights=weights)),
        f"rollout/episode_length{suffix}": float(np.average(lengths, weights=weights)),
    }
