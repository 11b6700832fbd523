"""EnvFactory: what makes one env, small enough to be sent to a worker.

Calling it gives the env by id or dotted path with its wrappers around it, the first innermost.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from ml_pipeline.errors import UserError
from ml_pipeline.extras import missing_extra
from ml_pipeline.targets import TargetError, check_arguments, import_dotted, import_entry


class EnvError(UserError):
    """The env that was asked for cannot be made."""


@dataclass(frozen=True)
class EnvFactory:
    """A picklable ``() -> gym.Env``; ``target``, a dotted path, wins over ``id``."""

    id: str | None
    target: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Mapping[str, Any] = field(default_factory=dict)  # name -> _target_ entry, in order

    def __call__(self, **extra_kwargs: Any) -> gym.Env[Any, Any]:
        kwargs = {**self.kwargs, **extra_kwargs}
        env = self._make_target(kwargs) if self.target else self._make_id(kwargs)
        for name, entry in self.wrappers.items():
            key = f"env.wrappers.{name}"
            wrapper, arguments = import_entry(entry, key=key)
            check_arguments(wrapper, arguments, key=key)
            env = wrapper(env, **arguments)
        return env

    def _make_target(self, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
        maker = import_dotted(str(self.target), key="env.target")
        if not callable(maker):
            raise TargetError(f"env.target={self.target} is no class or function that makes an env")
        check_arguments(maker, kwargs, key="env.kwargs")
        env = maker(**kwargs)
        if not isinstance(env, gym.Env):
            raise TargetError(
                f"env.target={self.target} made {type(env).__name__}, no gymnasium.Env"
            )
        return env

    def _make_id(self, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
        check_env_id(str(self.id))
        try:
            return gym.make(str(self.id), **kwargs)
        except (gym.error.DependencyNotInstalled, ImportError) as error:
            raise missing_extra(f"env.id={self.id}", error) from error
        except TypeError as error:
            # gym.make passes kwargs on to the env's own __init__.
            raise EnvError(
                f"env.id={self.id} does not take env.kwargs {kwargs}: {error}"
            ) from error


def check_env_id(env_id: str) -> None:
    """Refuse an id that Gymnasium does not know, with the ids that look like it."""
    try:
        gym.spec(env_id)
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f" ({error})"
        raise EnvError(f"env.id={env_id} is not a registered environment{hint}") from error
