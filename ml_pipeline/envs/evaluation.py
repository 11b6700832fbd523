"""EvaluationEnv: plays a list of seeded episodes and then pauses.

Several of them in one vector env evaluate a policy in batches, and an env that is done early costs
nothing while the others finish. Workers import this module: keep torch out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym

from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import counts_episodes
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv

# An env without a time limit may never end an episode. This is longer than any usual limit:
# Atari's is 27,000 steps of 4 frames.
MAX_EPISODE_STEPS = 30_000

# Keys of the options of a reset that begins an evaluation, and of the info of an ended episode.
STRIDE, END, MAX_STEPS, EVALUATED = "stride", "end", "max_steps", "evaluated"


class EvaluationEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A reset with options plays the episodes of seeds ``range(seed, end, stride)``, then pauses.

    The last info of each episode has its seed, return, length, and whether it was cut. Every
    evaluation starts with a new env, so that no wrapper keeps its state.
    """

    def __init__(self, make_env: Callable[[], gym.Env[Any, Any]], *, is_borrowed: bool = False):
        """``is_borrowed``: the env belongs to the caller, so it is neither renewed nor closed."""
        super().__init__(make_env())
        self._make_env = make_env
        self._is_borrowed = is_borrowed
        self._is_new = True
        self._counts_own_episodes = counts_episodes(self.env)
        self._seeds: list[int] = []  # of the episodes to play, the current one first
        self._idle: Any = None  # observation and info to return while paused
        self._max_steps = MAX_EPISODE_STEPS
        self._return, self._length = 0.0, 0
        self._lost_life = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if options is not None:
            return self._begin(int(seed or 0), options)
        if self._lost_life:
            self._lost_life = False
            return self.env.reset()
        del self._seeds[:1]
        if self._seeds:
            return self._start_episode()
        obs, info = deepcopy(self._idle)
        return obs, info

    def _begin(self, seed: int, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not (self._is_new or self._is_borrowed):
            self.env.close()
            self.env = self._make_env()
        self._is_new = self._lost_life = False
        self._seeds = list(range(seed, options[END], options[STRIDE])) or [seed]
        self._max_steps = options[MAX_STEPS]
        obs, info = self._start_episode()
        self._idle = deepcopy((obs, info))
        return obs, info

    def _start_episode(self) -> tuple[Any, dict[str, Any]]:
        self._return, self._length = 0.0, 0
        return self.env.reset(seed=self._seeds[0])

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self._seeds:
            obs, info = deepcopy(self._idle)
            return obs, 0.0, False, False, info
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        is_cut = self._length >= self._max_steps
        if not (terminated or truncated or is_cut):
            return obs, reward, False, False, info
        # A wrapper may end an episode after a lost life although the game continues.
        own = info.get("episode") if self._counts_own_episodes else None
        if self._counts_own_episodes and own is None and not is_cut:
            self._lost_life = True
            return obs, reward, terminated, truncated, info
        is_cut = is_cut and not (terminated or truncated)
        result = {"seed": self._seeds[0], "return": self._return, "length": self._length}
        if own is not None:
            result |= {"return": float(own["r"]), "length": int(own["l"])}
        info = {**info, EVALUATED: {**result, "is_cut": is_cut}}
        return obs, reward, terminated, truncated or is_cut, info

    def close(self) -> None:
        if not self._is_borrowed:
            self.env.close()


MakeEnv = Callable[[], gym.Env[Any, Any]]


def make_evaluation_envs(make_env: MakeEnv, settings: VecEnvConfig, *, n_envs: int) -> SerialEnv:
    """``n_envs`` evaluation envs in this process."""
    env_fns = [partial(EvaluationEnv, make_env)] * n_envs
    return SerialEnv(env_fns, infos=settings.infos)  # type: ignore[arg-type]  # VecEnvConfig


def make_evaluation_workers(
    make_env: MakeEnv, settings: VecEnvConfig, *, n_envs: int
) -> ParallelEnv:
    """``n_envs`` evaluation envs in workers, under the deadline of ``settings``."""
    return ParallelEnv(
        [partial(EvaluationEnv, make_env)] * n_envs,
        infos=settings.infos,  # type: ignore[arg-type]  # checked by VecEnvConfig
        n_workers=settings.n_workers,
        start_method=settings.start_method,  # type: ignore[arg-type]  # as above
        step_timeout=settings.step_timeout_seconds,
    )
