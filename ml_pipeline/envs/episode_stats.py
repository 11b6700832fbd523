"""EpisodeStats: undiscounted return and length of each episode, from the env's own rewards.

Also the numbers in the info of its last step, such as ``is_success``. ``EpisodeWindow`` makes the
metrics of a run from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv
from ml_pipeline.records import Metrics, StateDict

N_RECENT = 100  # episodes in a running mean
MAX_INFOS = 20  # names per run: each is a metric
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


class Episode(NamedTuple):
    """A finished episode, or the mean of ``n`` of them."""

    episode_return: float  # undiscounted sum of the env's rewards
    length: float
    n: int = 1
    infos: Mapping[str, float] = MappingProxyType({})  # the numbers in the info of its last step


class EpisodeStats:
    """Adds up the rewards of a vector env; all arrays are [n_envs].

    ``from_infos``: read episodes from the infos of Gymnasium's ``RecordEpisodeStatistics``
    instead. That wrapper is inside those that change rewards or end episodes early.
    """

    def __init__(self, n_envs: int, *, from_infos: bool = False) -> None:
        self._from_infos = from_infos
        self._return = np.zeros(n_envs)
        self._length = np.zeros(n_envs, dtype=np.int64)

    def step(
        self,
        reward: NDArray[np.float64],
        done: NDArray[np.bool_],
        infos: Mapping[str, Any],
        counts: NDArray[np.bool_] | int = 1,
    ) -> list[Episode]:
        """Add one step; returns the episodes that ended in it, in the order of the envs.

        ``counts``: in which envs it is a step of an episode.
        """
        self._return += reward
        self._length += counts
        if not np.count_nonzero(done):  # far faster than any()
            return []
        ended = np.flatnonzero(done).tolist()
        if self._from_infos:
            episodes = _episodes_in(infos, ended)
        else:
            final = infos.get("final_info", {})
            episodes = [
                Episode(float(self._return[i]), int(self._length[i]), 1, row_numbers(final, i))
                for i in ended
            ]
        self._return[ended] = 0.0
        self._length[ended] = 0
        return episodes

    def resize(self, n_envs: int) -> None:
        """Envs that stay keep their sums; new ones start at 0."""
        kept = min(n_envs, len(self._return))
        self._return = np.concatenate([self._return[:kept], np.zeros(n_envs - kept)])
        lengths = np.zeros(n_envs - kept, dtype=np.int64)
        self._length = np.concatenate([self._length[:kept], lengths])

    def state_dict(self) -> StateDict:
        return {"return": self._return.tolist(), "length": self._length.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self._return = np.array(state["return"], dtype=np.float64)
        self._length = np.array(state["length"], dtype=np.int64)


def _episodes_in(infos: Mapping[str, Any], ended: Sequence[int]) -> list[Episode]:
    final = infos.get("final_info", {})
    if "episode" not in final:
        return []
    episode, has_episode = final["episode"], final["_episode"]
    return [
        Episode(float(episode["r"][i]), int(episode["l"][i]), 1, row_numbers(final, i))
        for i in ended
        if has_episode[i]
    ]


def row_numbers(infos: Mapping[str, Any], row: int) -> dict[str, float]:
    """``final_numbers`` of one env in a vector env's infos: arrays, and masks named ``_key``."""
    return final_numbers(
        {
            name: values[row]
            for name, values in infos.items()
            if isinstance(values, np.ndarray) and f"_{name}" in infos and infos[f"_{name}"][row]
        }
    )


def final_numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """The numbers and bools in the info of an episode's last step, as floats; at most 20."""
    numbers: dict[str, float] = {}
    for name, value in info.items():
        is_number = isinstance(value, _NUMBERS) and isinstance(name, str) and name.isprintable()
        if is_number and len(numbers) < MAX_INFOS and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


def info_means(episodes: Sequence[Episode], names: Sequence[str] | None = None) -> dict[str, float]:
    """The mean of each number in the infos, over the episodes that have it.

    ``names`` None: those of the first episodes, at most 20.
    """
    if names is None:
        names = list(dict.fromkeys(name for each in episodes for name in each.infos))[:MAX_INFOS]
    means = {}
    for name in names:
        values = [each.infos[name] for each in episodes if name in each.infos]
        if values:
            means[name] = float(np.mean(values))
    return means


class EpisodeWindow:
    """The episode statistics of a run, over the last iteration and the last 100 episodes.

    Numbers in final infos are averaged over the last 100: ``rollout/info/is_success``.
    """

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
        self.n_episodes = int(state["n_episodes"])
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


def counts_episodes(env: AnyEnv) -> bool:
    """Whether ``env`` or a wrapper has ``counts_own_episodes = True``: infos report its episodes.

    For those that end an episode before the game is over, such as one episode per life.
    """
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return any(getattr(each, "counts_own_episodes", False) for each in layers)
