"""EnvFactory: makes one env; it is small enough to send to a worker.

Calling it makes the env from an id or a dotted path and applies the wrappers, the first innermost.
Texts in a Dict observation are left out.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv, OneEnv
from ml_pipeline.envs.kinds import AnyEnv, AnySpace, AnyVectorEnv
from ml_pipeline.envs.wrappers.without_text import WithoutText, text_keys
from ml_pipeline.errors import UserError, place_of, type_and_line
from ml_pipeline.extras import missing_extra
from ml_pipeline.given import keep
from ml_pipeline.targets import (
    TargetError,
    check_arguments,
    import_dotted,
    import_entry,
    import_module,
)

# How ids begin, and the package that registers them when it is imported.
_PACKAGES = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
# The ids of Atari games before ALE/; they come without the usual wrappers.
_ATARI_OF_GYM = re.compile(r"(\w+?)(?:-ram)?(?:NoFrameskip|Deterministic)-v\d+")


class EnvError(UserError):
    """The env of the config cannot be made."""


@dataclass(frozen=True)
class EnvFactory:
    """A picklable ``() -> gym.Env``; ``target``, a dotted path, overrides ``id``.

    If it names a vector env, ``make_batch`` makes one, and a call makes one with a single env.
    """

    id: str | None
    target: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Mapping[str, Any] = field(default_factory=dict)  # name -> _target_ entry, in order
    given: tuple[tuple[str, Any], ...] = ()  # what the others name and a worker cannot import
    vector: bool = False  # make ``id`` by gymnasium.make_vec

    def __call__(self) -> AnyEnv:
        keep(self.given)
        if self.is_vector:
            return OneEnv(self.make_batch(1))
        env = self._make_target() if self.target else self._make_id()
        for key, wrapper, arguments in self._wrappers():
            with _named(f"{key} cannot be made"):
                env = wrapper(env, **arguments)
            if not isinstance(env, gym.Env):
                what = f"{wrapper.__module__}.{wrapper.__name__}"
                raise TargetError(
                    f"{key}: {what} returned {type(env).__name__}, not a gymnasium.Env"
                )
            _check_made(env, key)
        space = env.observation_space
        # An observation of texts alone is refused later.
        if isinstance(space, spaces.Dict) and 0 < len(text_keys(space)) < len(space):
            return WithoutText(env)
        return env

    @property
    def is_vector(self) -> bool:
        """Whether it names a vector env: a class, a function with ``num_envs``, or such an id."""
        if self.target is None:
            spec = _spec_of(str(self.id))
            return self.vector or spec.entry_point is None
        maker = import_dotted(self.target, key="env.target")
        if isinstance(maker, type):
            # A TorchVectorEnv has a ``single_env`` and batches of its own.
            return issubclass(maker, gym.vector.VectorEnv) and not hasattr(maker, "single_env")
        try:
            return "num_envs" in inspect.signature(maker).parameters
        except (TypeError, ValueError):  # not a function, or one without a signature
            return False

    @property
    def is_tensor_env(self) -> bool:
        """Whether it names a class of tensor envs, which has a ``single_env``."""
        if self.target is None:
            return False
        return hasattr(import_dotted(self.target, key="env.target"), "single_env")

    def make_batch(self, n_envs: int) -> ForeignVectorEnv:
        """One vector env with ``n_envs``, if ``is_vector``."""
        keep(self.given)
        key = f"env.target={self.target}" if self.target else f"env.id={self.id}"
        if "num_envs" in self.kwargs:
            raise EnvError("env.kwargs.num_envs: n_envs sets it; remove the key")
        maker, arguments = gym.make_vec, {**self.kwargs, "num_envs": n_envs}
        if self.target:
            maker = import_dotted(self.target, key="env.target")
            check_arguments(maker, arguments, key="env.kwargs")
        else:
            arguments["id"] = str(self.id)
        with _named(f"{key} cannot be made"):
            env: AnyVectorEnv = maker(**arguments)
        for wrapper_key, wrapper, given in self._wrappers():
            if isinstance(wrapper, type) and issubclass(wrapper, gym.Wrapper):
                raise EnvError(
                    f"{wrapper_key}: {wrapper.__name__} wraps single envs, but {key} is a vector "
                    "env; use one of gymnasium.wrappers.vector, or wrap the envs inside it"
                )
            with _named(f"{wrapper_key} cannot be made"):
                env = wrapper(env, **given)
        if not isinstance(env, gym.vector.VectorEnv):
            raise TargetError(
                f"{key} returned {type(env).__name__}, not a gymnasium.vector.VectorEnv; a "
                "function with a parameter num_envs must return one"
            )
        return ForeignVectorEnv(env, key, n_envs)

    def _wrappers(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Key, class and arguments of each, the innermost first."""
        for name, entry in self.wrappers.items():
            key = f"env.wrappers.{name}"
            wrapper, arguments = import_entry(entry, key=key)
            check_arguments(wrapper, arguments, key=key, given=1)
            yield key, wrapper, arguments

    def rendering(self, render_mode: str) -> EnvFactory:
        """The same factory, for envs with this render mode."""
        return replace(self, kwargs={**self.kwargs, "render_mode": render_mode})

    @property
    def is_deterministic(self) -> bool:
        """Whether the env's class declares that the actions alone decide an episode.

        It sets ``is_deterministic = True``: neither the seed of a reset nor anything else matters.
        A wrapper may draw random numbers, so an env with wrappers is not known to be deterministic.
        """
        if self.target is None or self.wrappers:
            return False
        maker = import_dotted(self.target, key="env.target")
        return getattr(maker, "is_deterministic", False) is True

    def _make_target(self) -> AnyEnv:
        maker = import_dotted(str(self.target), key="env.target")
        if not callable(maker):
            raise TargetError(f"env.target={self.target} is not callable; name a class or function")
        # A TorchVectorEnv is a batch; its single_env makes one env.
        maker = getattr(maker, "single_env", maker)
        check_arguments(maker, self.kwargs, key="env.kwargs")
        with _named(f"env.target={self.target} cannot be made"):
            env = maker(**self.kwargs)
        if isinstance(env, gym.vector.VectorEnv):
            raise TargetError(
                f"env.target={self.target} returned a {type(env).__name__}; give the function the "
                "parameter num_envs, so that the vector env gets as many envs as the run wants"
            )
        if not isinstance(env, gym.Env):
            raise TargetError(
                f"env.target={self.target} returned {type(env).__name__}, not a gymnasium.Env"
            )
        _check_made(env, f"env.target={self.target}")
        return env

    def _make_id(self) -> AnyEnv:
        check_env_id(str(self.id))
        given = f" with env.kwargs {dict(self.kwargs)}" if self.kwargs else ""
        with _named(f"env.id={self.id}{given} cannot be made"):
            return gym.make(str(self.id), **self.kwargs)


def _check_made(env: AnyEnv, key: str) -> None:
    """Refuse an env without spaces, and a wrapper that does not know its env."""
    kind = type(env).__name__
    if isinstance(env, gym.Wrapper) and "env" not in vars(env):
        raise EnvError(f"{key}: {kind}.__init__ must call super().__init__(env)")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise EnvError(f"{key}: {kind} has no {name}; set self.{name} in {kind}.__init__")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise errors of foreign code as our own, with the config key that led to them."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise missing_extra(what.removesuffix(" cannot be made"), error) from error
    except (Exception, SystemExit) as error:  # envs may raise anything
        text = f": {error}" if str(error).strip() else ""
        place = place_of(error)
        raise EnvError(f"{what}: {type(error).__name__}{text}{place}") from error


@contextmanager
def step_errors_named() -> Iterator[None]:
    """Raise what an env raises in a step or a reset as one line with its file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # envs may raise anything
        what, place = type_and_line(error), place_of(error)
        raise EnvError(f"the env raised {what.removesuffix(place)}{place}") from error


def allowed_action(
    env: AnyEnv, obs: Any, info: Mapping[str, Any], mask_key: str = "action_mask"
) -> Any:
    """A random action; one that the mask allows if obs or info has a mask."""
    mask = info.get(mask_key)
    if mask is None and isinstance(obs, dict):
        mask = obs.get(mask_key)
    return _allowed(env.action_space, mask)


def _allowed(space: AnySpace, mask: Any) -> Any:
    if mask is None:
        return space.sample()
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return _allowed_parts(space, mask)
    if isinstance(space, spaces.Discrete):
        return space.sample(np.asarray(mask, dtype=np.int8))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        if not isinstance(mask, tuple):
            mask = np.split(np.asarray(mask), space.nvec.cumsum()[:-1])
        return space.sample(tuple(np.asarray(part, dtype=np.int8) for part in mask))
    sizes = _numbers_of_choices(space)
    if not len(sizes):
        return space.sample()
    # Agents accept a mask with one array per choice; Gymnasium's spaces do not.
    flat = mask if not isinstance(mask, tuple) else np.concatenate([np.ravel(p) for p in mask])
    parts = np.split(np.asarray(flat).ravel() != 0, sizes.cumsum()[:-1])
    start = space.start.ravel() if isinstance(space, spaces.MultiDiscrete) else np.zeros_like(sizes)
    chosen = [space.np_random.choice(np.flatnonzero(part)) for part in parts]
    return (np.array(chosen) + start).reshape(space.shape).astype(space.dtype)


def _allowed_parts(space: spaces.Dict | spaces.Tuple[Any], mask: Any) -> Any:
    parts = _parts_of(space)
    if isinstance(mask, Mapping):
        masks: Sequence[Any] = [mask.get(name) for name in parts]
    elif isinstance(mask, np.ndarray) and mask.dtype != object:  # of all parts, one after the other
        ends = np.cumsum([_numbers_of_choices(part).sum() for part in parts.values()])
        masks = np.split(mask, ends[:-1])
    else:
        masks = list(mask)
    chosen = [_allowed(part, each) for part, each in zip(parts.values(), masks, strict=True)]
    is_dict = isinstance(space, spaces.Dict)
    return dict(zip(parts, chosen, strict=True)) if is_dict else tuple(chosen)


def _parts_of(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, AnySpace]:
    return dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def _numbers_of_choices(space: AnySpace) -> NDArray[np.int64]:
    """The number of choices for each part of an action; none for a part that is not discrete."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return np.concatenate([_numbers_of_choices(part) for part in _parts_of(space).values()])
    if isinstance(space, spaces.Discrete):
        return np.array([space.n])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel()
    if isinstance(space, spaces.MultiBinary):
        return np.full(int(np.prod(space.shape)), 2)
    return np.zeros(0, dtype=np.int64)


def close_env(env: AnyEnv) -> None:
    """Close an env; only warn if it raises, because the run is over."""
    try:
        env.close()
    except Exception as error:  # envs may raise anything
        message = f"an env raised while it was closed: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def check_env_id(env_id: str) -> None:
    """Refuse an id that Gymnasium does not know, and suggest similar ids."""
    _spec_of(env_id)


def _spec_of(env_id: str) -> EnvSpec:
    """Refuse an id that Gymnasium does not know, and suggest similar ids.

    As in ``gym.make``, ``my_module:MyEnv-v0`` imports the module that registers the env.
    """
    module, _, registered = env_id.rpartition(":")
    if module:
        import_module(module, key="env.id", path=env_id)
    owner = next((_PACKAGES[each] for each in _PACKAGES if registered.startswith(each)), None)
    is_missing = owner is not None and importlib.util.find_spec(owner) is None
    if owner is not None and not is_missing:
        import_module(owner, key="env.id", path=env_id)
    try:
        return gym.spec(registered)
    except gym.error.NamespaceNotFound as error:
        # A separate package registers each namespace: ale_py registers ALE/Pong-v5.
        raise missing_extra(f"env.id={env_id}", error) from error
    except (gym.error.Error, ImportError) as error:
        if is_missing:
            raise missing_extra(
                f"env.id={env_id}", ImportError(f"No module named {owner!r}")
            ) from error
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.6)
        hint = _how_to_register(module, registered)
        if game := _ATARI_OF_GYM.fullmatch(registered):
            hint = f"write env=atari env.id=ALE/{game[1]}-v5"
        elif near:
            hint = f"did you mean {' or '.join(near)}?"
        raise EnvError(f"env.id={env_id} is not a registered environment; {hint}") from error


def _how_to_register(module: str, env_id: str) -> str:
    if module:
        return f"importing {module} does not register it"
    return f"if a package registers it, name the package first: env.id=PACKAGE:{env_id}"
