"""RewardShaping: adds weighted terms to the reward; statistics keep the env's own return.

A potential term adds ``gamma * phi(next_obs) - phi(obs)``, with phi = 0 at a terminal state. It
does not change which policy is best. A plain term adds its value. In a two-player env, terms see
and reward player 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from ml_pipeline.envs.episode_stats import counts_episodes
from ml_pipeline.envs.kinds import AnyEnv, AnyWrapper, Info
from ml_pipeline.targets import TargetError, import_entry

# The parameters of the function of each kind of term.
_PARAMETERS = {"potential": ("obs",), "plain": ("obs", "action", "next_obs", "info")}


class Term(NamedTuple):
    """One term; its weight is an attribute of the wrapper."""

    name: str
    kind: str  # potential | plain
    function: Callable[..., float]


class RewardShaping(AnyWrapper):
    """Each term has the attribute ``weight_NAME``; a new value counts from the next reset on.

    Every info has the episode so far: ``episode`` with the env's own return and length, and
    ``shaping_return``, the sum of what the terms added.
    """

    counts_own_episodes = True

    def __init__(
        self, env: AnyEnv, terms: Mapping[str, Mapping[str, object]], gamma: float = 0.99
    ) -> None:
        """``terms``: name -> ``_target_`` of a function, ``kind`` and ``weight``.

        The function of a potential term takes ``obs``; that of a plain term takes ``obs``,
        ``action``, ``next_obs`` and ``info``. ``gamma`` must be that of the agent.
        """
        super().__init__(env)
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma={gamma}: must be between 0 and 1")
        self.gamma = gamma
        self.terms = [_term(name, entry) for name, entry in terms.items()]
        for name, entry in terms.items():
            weight = entry.get("weight", 1.0)
            setattr(self, f"weight_{name}", _checked_weight(name, weight))
        self._counts_inside = counts_episodes(env)
        # A two-player env has the attribute opponent, and it is None.
        has_opponent = env.has_wrapper_attr("opponent")
        self._is_two_player = has_opponent and env.get_wrapper_attr("opponent") is None
        self._active: list[tuple[Term, float]] = []  # terms with a weight, in this episode
        self._potential: list[float] = []  # of the current observation, one per active term
        self._obs: Any = None  # current, for plain terms
        self._return = self._shaping = 0.0
        self._length = 0

    def reset(self, **kwargs: Any) -> tuple[Any, Info]:
        obs, info = self.env.reset(**kwargs)
        weights = [
            _checked_weight(each.name, getattr(self, f"weight_{each.name}")) for each in self.terms
        ]
        self._active = [each for each in zip(self.terms, weights, strict=True) if each[1]]
        self._return = self._shaping = 0.0
        self._length = 0
        self._see(self._player(obs), is_terminal=False)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, seen, potential = self._obs, self._player(obs), self._potential
        self._see(seen, is_terminal=bool(terminated))
        own_action = self._player(action)
        shaping = 0.0
        for index, (term, weight) in enumerate(self._active):
            if term.kind == "potential":
                value = self.gamma * self._potential[index] - potential[index]
            else:
                value = _finite(term, term.function(before, own_action, seen, info))
            shaping += weight * value
        self._return += float(reward)
        self._shaping += shaping
        self._length += 1
        info = {**info, "shaping_return": self._shaping}
        if not self._counts_inside:
            info["episode"] = {"r": self._return, "l": self._length}
        return obs, float(reward) + shaping, terminated, truncated, info

    def _see(self, obs: Any, *, is_terminal: bool) -> None:
        """Make ``obs`` the current observation."""
        self._potential = [
            0.0 if is_terminal or term.kind == "plain" else _finite(term, term.function(obs))
            for term, _ in self._active
        ]
        if any(term.kind == "plain" for term, _ in self._active):
            self._obs = deepcopy(obs)  # an env may reuse its buffer

    def _player(self, rows: Any) -> Any:
        """The row of player 0 in a two-player env."""
        return rows[0] if self._is_two_player else rows


def _term(name: str, entry: Mapping[str, object]) -> Term:
    key = f"terms.{name}"
    function, rest = import_entry(entry, key=key)
    for unknown in rest.keys() - {"kind", "weight"}:
        raise TargetError(f"{key}.{unknown} is unknown; a term has _target_, kind and weight")
    kind = rest.get("kind", "plain")
    if kind not in _PARAMETERS:
        raise TargetError(f"{key}.kind={kind}: must be {' or '.join(_PARAMETERS)}")
    try:
        inspect.signature(function).bind(*_PARAMETERS[kind])
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{key}._target_={entry['_target_']}: a {kind} term calls it with "
            f"({', '.join(_PARAMETERS[kind])}); write such a function"
        ) from error
    return Term(name, kind, function)


def _checked_weight(name: str, weight: Any) -> float:
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise ValueError(f"weight_{name}={weight}: must be a finite number")
    return float(weight)


def _finite(term: Term, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the reward term {term.name} returned {value}; it must be finite")
    return float(value)
