"""EnvFactory: what makes one env, small enough to be sent to a worker.

Calling it gives the env by id or dotted path with its wrappers around it, the first innermost.
"""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ml_pipeline.errors import UserError
from ml_pipeline.extras import missing_extra
from ml_pipeline.targets import (
    TargetError,
    check_arguments,
    import_dotted,
    import_entry,
    import_module,
)

# Who registers the envs of a namespace, once it is imported.
_NAMESPACES = {"ALE": "ale_py"}


class EnvError(UserError):
    """The env that was asked for cannot be made."""


@dataclass(frozen=True)
class EnvFactory:
    """A picklable ``() -> gym.Env``; ``target``, a dotted path, wins over ``id``."""

    id: str | None
    target: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Mapping[str, Any] = field(default_factory=dict)  # name -> _target_ entry, in order

    def __call__(self) -> gym.Env[Any, Any]:
        env = self._make_target() if self.target else self._make_id()
        for name, entry in self.wrappers.items():
            key = f"env.wrappers.{name}"
            wrapper, arguments = import_entry(entry, key=key)
            check_arguments(wrapper, arguments, key=key, given=1)
            with _blamed_on(f"{key} cannot be made"):
                env = wrapper(env, **arguments)
        return env

    def rendering(self, render_mode: str) -> EnvFactory:
        """The same, for envs that are looked at."""
        return replace(self, kwargs={**self.kwargs, "render_mode": render_mode})

    def _make_target(self) -> gym.Env[Any, Any]:
        maker = import_dotted(str(self.target), key="env.target")
        if not callable(maker):
            raise TargetError(f"env.target={self.target} is no class or function that makes an env")
        # A batch of envs that are tensors: a single one of them is made apart.
        maker = getattr(maker, "single_env", maker)
        check_arguments(maker, self.kwargs, key="env.kwargs")
        with _blamed_on(f"env.target={self.target} cannot be made"):
            env = maker(**self.kwargs)
        if not isinstance(env, gym.Env):
            raise TargetError(
                f"env.target={self.target} made {type(env).__name__}, no gymnasium.Env"
            )
        return env

    def _make_id(self) -> gym.Env[Any, Any]:
        check_env_id(str(self.id))
        given = f" with env.kwargs {dict(self.kwargs)}" if self.kwargs else ""
        with _blamed_on(f"env.id={self.id}{given} cannot be made"):
            return gym.make(str(self.id), **self.kwargs)


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    """Tell a failure by what the config says, not by where it happened."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise missing_extra(what.removesuffix(" cannot be made"), error) from error
    except (Exception, SystemExit) as error:  # envs raise what they like
        raise EnvError(f"{what}: {type(error).__name__}: {error}") from error


def try_env(
    env: gym.Env[Any, Any], name: str, *, mask_key: str = "action_mask"
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """One reset and one step, so that an env of another API is found out.

    What reset gave, and the info of the step.
    """
    with _blamed_on(f"env {name} cannot be reset with a seed and stepped as Gymnasium 1.x asks"):
        obs, info = deepcopy(env.reset(seed=0))
        env.action_space.seed(0)
        _, _, _, _, step_info = env.step(allowed_action(env, obs, info, mask_key))
        for each in (info, step_info):
            if not isinstance(each, dict):
                raise TypeError(f"info is {each!r}, no dict")
    return obs, info, step_info


def allowed_action(
    env: gym.Env[Any, Any], obs: Any, info: Mapping[str, Any], mask_key: str = "action_mask"
) -> Any:
    """A random action; where the env gives a mask with it, one that the mask allows."""
    mask = info.get(mask_key)
    if mask is None and isinstance(obs, dict):
        mask = obs.get(mask_key)
    space = env.action_space
    if mask is None:
        return space.sample()
    if isinstance(space, spaces.Discrete):
        return space.sample(np.asarray(mask, dtype=np.int8))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        if not isinstance(mask, tuple):
            mask = np.split(np.asarray(mask), space.nvec.cumsum()[:-1])
        return space.sample(tuple(np.asarray(part, dtype=np.int8) for part in mask))
    sizes = _numbers_of_choices(space)
    if sizes is None:
        return space.sample()
    # Gymnasium has no masks of this form: as the agent takes them, choice by choice.
    flat = mask if not isinstance(mask, tuple) else np.concatenate([np.ravel(p) for p in mask])
    parts = np.split(np.asarray(flat).ravel() != 0, sizes.cumsum()[:-1])
    start = space.start.ravel() if isinstance(space, spaces.MultiDiscrete) else np.zeros_like(sizes)
    chosen = [space.np_random.choice(np.flatnonzero(part)) for part in parts]
    return (np.array(chosen) + start).reshape(space.shape).astype(space.dtype)


def _numbers_of_choices(space: gym.Space[Any]) -> np.ndarray[Any, Any] | None:
    """How many values each number of an action can have; None where they cannot be counted."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel()
    if isinstance(space, spaces.MultiBinary):
        return np.full(int(np.prod(space.shape)), 2)
    return None


def close_env(env: gym.Env[Any, Any]) -> None:
    """Close an env; what it raises is told, but does not spoil a run that is over."""
    try:
        env.close()
    except Exception as error:  # envs raise what they like
        message = f"an env raised as it was closed: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def check_env_id(env_id: str) -> None:
    """Refuse an id that Gymnasium does not know, with the ids that look like it.

    As in ``gym.make``, ``my_module:MyEnv-v0`` imports the module that registers the env.
    """
    module, _, registered = env_id.rpartition(":")
    if module:
        import_module(module, key="env.id", path=env_id)
    owner = _NAMESPACES.get(registered.partition("/")[0])
    if owner is not None and importlib.util.find_spec(owner) is not None:
        import_module(owner, key="env.id", path=env_id)
    try:
        gym.spec(registered)
    except gym.error.NamespaceNotFound as error:
        # A namespace is brought by a package of its own: ALE/Pong-v5 by ale_py.
        raise missing_extra(f"env.id={env_id}", error) from error
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f" ({error})"
        raise EnvError(f"env.id={env_id} is not a registered environment{hint}") from error
