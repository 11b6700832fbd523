"""ForCritic: what a critic may know in training and an actor must not: hidden entries, infos.

    env.wrappers.critic._target_=ml_pipeline.envs.wrappers.for_critic.ForCritic \
        env.wrappers.critic.hidden=[1,3] agent.obs_groups.actor=[obs]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.errors import UserError


class ForCritic(gym.Wrapper[Any, Any, Any, Any]):
    """The observation becomes a Dict: ``obs`` for both, ``critic`` for the critic alone."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        hidden: Sequence[int] = (),
        infos: Mapping[str, int] | None = None,
    ) -> None:
        """``hidden``: entries of a vector observation. ``infos``: sizes of values in the infos."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise UserError(f"ForCritic needs an observation that is one vector, got {space}")
        outside = [each for each in hidden if not 0 <= each < space.shape[0]]
        if outside or not (hidden or infos):
            raise UserError(
                f"ForCritic: hidden={list(hidden)} and infos={infos} must name entries from 0 to "
                f"{space.shape[0] - 1}, or infos"
            )
        self._hidden = list(hidden)
        self._seen = [i for i in range(space.shape[0]) if i not in self._hidden]
        self._infos = dict(infos or {})
        size = len(self._hidden) + sum(self._infos.values())
        self.observation_space = spaces.Dict(
            {
                "obs": spaces.Box(space.low[self._seen], space.high[self._seen], dtype=np.float32),
                "critic": spaces.Box(-np.inf, np.inf, (size,), np.float32),
            }
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._split(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._split(obs, info), reward, terminated, truncated, info

    def _split(self, obs: NDArray[Any], info: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        parts = [np.asarray(obs)[self._hidden]]
        for name, size in self._infos.items():
            value = np.ravel(np.asarray(info.get(name, ()), dtype=np.float32))
            if len(value) != size:
                raise UserError(
                    f"ForCritic: the info has {len(value)} numbers under {name!r}, and infos says "
                    f"{size}; the env must return them from every reset and step"
                )
            parts.append(value)
        critic = np.concatenate(parts).astype(np.float32)
        return {"obs": np.asarray(obs)[self._seen].astype(np.float32), "critic": critic}
