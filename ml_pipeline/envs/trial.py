"""try_env: plays one env for a moment before training and reports what it found.

With ``vec_env=parallel`` this happens in a worker, so that an env that crashes or hangs cannot take
the main process with it. Workers import this module: keep torch out of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.episode_stats import counts_episodes, final_numbers
from ml_pipeline.envs.factory import EnvError, allowed_action, close_env
from ml_pipeline.envs.foreign_vector_env import NO_SNAPSHOT, OneEnv
from ml_pipeline.envs.kinds import AnyEnv, AnySpace, Info, MakeEnv
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.vec_env import WorkerError
from ml_pipeline.envs.workers.pool import call_in_worker
from ml_pipeline.envs.workers.shared_arrays import Layout
from ml_pipeline.envs.workers.slice import as_flag, as_number
from ml_pipeline.envs.workers.trees import view_of_row, write_value
from ml_pipeline.envs.wrappers.without_text import WithoutText
from ml_pipeline.errors import UserError, first_line, place_of

Result = TypeVar("Result")

_MANY_SHORT = 10  # episodes of one step, one after the other


class EnvTrial(NamedTuple):
    """What a few steps of one env showed."""

    observation_space: AnySpace
    action_space: AnySpace
    obs: Any  # of the first reset
    info: Info  # of the first reset; only the action mask
    step_info: Info  # of the first step; only the action mask
    counts_episodes: bool  # see episode_stats.counts_episodes
    no_snapshot: str | None  # why an episode cannot continue in another process; None: it can
    n_steps: int  # how long the trial was
    step_seconds: float  # mean time of a step, resets included
    has_ended: bool  # at least one episode ended
    has_time_limit: bool  # the env declares one to Gymnasium
    has_reset_rows: bool  # some steps of the vector env only reset an env
    remarks: list[str]  # observations that do not fit their space, and what is left out of them


def try_env(
    make_env: MakeEnv,
    name: str,
    *,
    mask_key: str = "action_mask",
    allow_nonfinite: bool = False,
    seconds: float = 0.02,
    least_steps: int = 1,
    most_steps: int = 500,
) -> EnvTrial:
    """Play with random actions for about ``seconds``; the errors of the env become ``EnvError``.

    Rewards and observations that are not finite are errors too, unless ``allow_nonfinite``.
    """
    env = make_env()
    try:
        with _errors_of(env, name):
            _check_spaces(env)
            env.action_space.seed(0)
            obs, info = deepcopy(_reset(env, seed=0))
            check = _ObservationCheck(env, allow_nonfinite=allow_nonfinite)
            check(obs, "reset")
            step_info, durations, has_ended, n_short = _play(
                env,
                obs,
                info,
                check,
                mask_key=mask_key,
                seconds=seconds,
                n_steps=(least_steps, most_steps),
            )
        spec = env.spec
        base, has_reset_rows = env.unwrapped, False
        no_snapshot: str | None = NO_SNAPSHOT
        if isinstance(base, OneEnv):
            has_reset_rows = base.has_reset_rows
        else:
            no_snapshot = why_no_snapshot(env, make_env, mask_key=mask_key)
        return EnvTrial(
            env.observation_space,
            env.action_space,
            obs,
            {mask_key: info[mask_key]} if mask_key in info else {},
            {mask_key: step_info[mask_key]} if mask_key in step_info else {},
            counts_episodes(env),
            no_snapshot,
            len(durations),
            float(np.mean(durations[2:] or durations)),  # the first steps are slow
            has_ended,
            spec is not None and spec.max_episode_steps is not None,
            has_reset_rows,
            [*_left_out(env), *check.remarks(), *_short_episodes(n_short)],
        )
    finally:
        close_env(env)


def in_worker(trial: Callable[[], Result], name: str, settings: VecEnvConfig) -> Result:
    """``trial()``, of the env ``name``, in a worker and under the deadline of ``settings``."""
    try:
        return call_in_worker(
            trial,
            start_method=settings.start_method or "spawn",  # type: ignore[arg-type]  # VecEnvConfig
            seconds=settings.step_timeout_seconds,
        )
    except WorkerError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise EnvError(f"env {name} failed in its trial before training: {error}") from error


def try_phases(
    make_env: MakeEnv,
    name: str,
    *,
    phases: Mapping[str, Mapping[str, object]],
    mask_key: str = "action_mask",
    seconds: float = 0.02,
    most_steps: int = 500,
) -> dict[str, list[str] | None]:
    """Play one env with the attributes of each phase, one phase after the other.

    Returns the names of the numbers in the info of an episode's last step; None if none ended.
    """
    env = make_env()
    found: dict[str, list[str] | None] = {}
    try:
        env.action_space.seed(0)
        for phase, settings in phases.items():
            key = f"curriculum.phases.{phase}.env"
            for attribute in settings:
                _check_attribute(env, attribute, key)
            try:
                for attribute, value in settings.items():
                    env.set_wrapper_attr(attribute, value)
                found[phase] = _last_numbers(env, mask_key, seconds, most_steps)
            except (Exception, SystemExit) as error:  # envs may raise anything
                reason = f"{type(error).__name__}: {first_line(error, n_lines=5)}{place_of(error)}"
                raise EnvError(f"{key}: env {name} fails with these settings: {reason}") from error
    finally:
        close_env(env)
    return found


def _check_attribute(env: AnyEnv, name: str, key: str) -> None:
    if env.has_wrapper_attr(name) and not callable(env.get_wrapper_attr(name)):
        return
    layers, inner = [env], env
    while isinstance(inner, gym.Wrapper):
        inner = inner.env
        layers.append(inner)
    known = [each for layer in layers for each in vars(layer) if not each.startswith("_")]
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else "name one that takes effect at a reset"
    raise EnvError(f"{key}.{name}: the env has no attribute of this name; {fix}")


def _last_numbers(env: AnyEnv, mask_key: str, seconds: float, most_steps: int) -> list[str] | None:
    """The names of the numbers in the last info of one episode; None if it takes too long."""
    obs, info = _reset(env, seed=0)
    check = _ObservationCheck(env)
    check(obs, "reset")
    deadline = time.perf_counter() + seconds
    for _ in range(most_steps):
        action = allowed_action(env, obs, info, mask_key)
        obs, _, terminated, truncated, info = _checked_step(env, env.step(action))
        check(obs, "step")
        if terminated or truncated:
            return list(final_numbers(info))
        if time.perf_counter() > deadline:
            break
    return None


def slow_trial(name: str, settings: VecEnvConfig, *, in_worker: bool) -> str:
    """What to say about a trial that takes long."""
    fix, deadline = "if it hangs, press Ctrl-C", settings.step_timeout_seconds
    if deadline is not None:
        how = "an env that hangs" if in_worker else f"{fix}; with vec_env=parallel, it"
        fix = f"{how} is killed after {deadline:g} s (vec_env.step_timeout_seconds)"
    return f"env {name}: its trial before training takes long; {fix}"


def _play(
    env: AnyEnv,
    obs: Any,
    info: Info,
    check: _ObservationCheck,
    *,
    mask_key: str,
    seconds: float,
    n_steps: tuple[int, int],
) -> tuple[Info, list[float], bool, int]:
    """The info of the first step, the time of each step, and whether an episode ended.

    And how many of the last episodes had one step. ``n_steps``: the least and the most.
    """
    first_info: Info | None = None
    durations: list[float] = []
    has_ended, length, n_short = False, 0, 0
    deadline = time.perf_counter() + seconds
    while True:
        now, played = time.perf_counter(), len(durations)
        is_enough = played >= n_steps[0] and (played >= n_steps[1] or now >= deadline)
        # The least steps of a very slow env would take too long.
        if is_enough or (played >= 5 and now > deadline + 10 * seconds):
            return first_info or {}, durations, has_ended, n_short
        action = allowed_action(env, obs, info, mask_key)
        start = time.perf_counter()
        returned = env.step(action)
        stepped = time.perf_counter() - start
        obs, reward, terminated, truncated, info = _checked_step(env, returned)
        check(obs, "step")
        if not (check.allow_nonfinite or np.isfinite(np.asarray(reward)).all()):
            raise ValueError(
                f"the reward of step {len(durations) + 1} is {reward}, not finite"
                f"{_place(env, 'step')}"
            )
        first_info = deepcopy(info) if first_info is None else first_info
        length += 1
        start = time.perf_counter()
        if terminated or truncated:
            n_short = n_short + 1 if length == 1 else 0
            has_ended, length = True, 0
            obs, info = _reset(env)
            check(obs, "reset")
        durations.append(stepped + time.perf_counter() - start)
        if len(durations) == 1:  # the first step may have compiled the env
            deadline = time.perf_counter() + seconds


def _check_spaces(env: AnyEnv) -> None:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name)
        if not isinstance(space, spaces.Space):
            raise TypeError(f"{name} is {space!r}; set it to a space of gymnasium.spaces")


def _reset(env: AnyEnv, seed: int | None = None) -> tuple[Any, Info]:
    """What the reset of an env returns, once it is known to be two values."""
    if type(env.unwrapped).reset is gym.Env.reset:
        raise TypeError(f"{type(env.unwrapped).__name__} has no method reset")
    returned: Any = env.reset() if seed is None else env.reset(seed=seed)
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise TypeError(
            f"reset must return obs, info; got {_brief(returned)}{_place(env, 'reset')}"
        )
    obs, info = returned
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, got {_brief(info)}{_place(env, 'reset')}")
    return obs, info


def _checked_step(env: AnyEnv, returned: Any) -> tuple[Any, float, bool, bool, Info]:
    """What a step returned, once it is known to be five values of the right kind."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 5):
        raise TypeError(
            "step must return obs, reward, terminated, truncated, info; got "
            f"{_brief(returned)}{_place(env, 'step')}"
        )
    obs, reward, terminated, truncated, info = returned
    try:
        number = as_number(reward)
        flags = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
    except TypeError as error:
        raise TypeError(f"{error}{_place(env, 'step')}") from error
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, got {_brief(info)}{_place(env, 'step')}")
    return obs, number, *flags, info


def _brief(returned: object) -> str:
    if isinstance(returned, (tuple, list)):
        kinds = ", ".join(type(each).__name__ for each in returned)
        return f"{len(returned)} values: {kinds}"
    return "None" if returned is None else f"one {type(returned).__name__}"


def _place(env: AnyEnv, method: str) -> str:
    """The file and line of the outermost layer's own ``method``, or what changes its result."""
    layer: Any = env
    while True:
        names = [method]
        if isinstance(layer, gym.ObservationWrapper):
            names.append("observation")
        elif isinstance(layer, gym.RewardWrapper) and method == "step":
            names.append("reward")
        own = [name for name in names if _is_own(type(layer), name)]
        if own or not isinstance(layer, gym.Wrapper):
            break
        layer = layer.env
    if not own:
        return ""
    code = getattr(type(layer), own[0]).__code__
    file = PurePath(code.co_filename).name
    return f" ({file}:{code.co_firstlineno} in {type(layer).__name__}.{own[0]})"


def _is_own(layer: type, method: str) -> bool:
    """Whether a class has Python code for ``method`` that is not from Gymnasium or from us."""
    function = getattr(layer, method, None)
    library = str(getattr(function, "__module__", "")).partition(".")[0]
    return hasattr(function, "__code__") and library not in ("gymnasium", "ml_pipeline")


def _left_out(env: AnyEnv) -> list[str]:
    if not isinstance(env, WithoutText):
        return []
    keys = ", ".join(map(repr, env.left_out))
    return [
        f"leaves {keys} out of the observation, because networks take no text; a wrapper in "
        "env.wrappers can turn it into numbers"
    ]


def _short_episodes(n_short: int) -> list[str]:
    if n_short < _MANY_SHORT:
        return []
    return [
        f"its last {n_short} episodes had one step each; if they should be longer, its reset does "
        "not start a new episode"
    ]


@contextmanager
def _errors_of(env: AnyEnv, name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # envs may raise anything
        place = place_of(error)
        if called := re.search(r"\.(reset|step)\(\) (?:got|takes|missing)", str(error)):
            place = place or _place(env, called[1])
        text = f": {first_line(error, n_lines=5)}" if str(error).strip() else ""
        raise EnvError(
            f"env {name} failed in its trial before training: {type(error).__name__}{text}{place}; "
            "it must work as in Gymnasium 1.x"
        ) from error


class _ObservationCheck:
    """Compares observations with their space; a wrong shape or kind is an error."""

    def __init__(self, env: AnyEnv, *, allow_nonfinite: bool = True) -> None:
        self.allow_nonfinite = allow_nonfinite
        self._env = env
        self._space = env.observation_space
        arrays = Layout(env.observation_space, env.action_space, 1, 0).arrays()
        self._view = view_of_row(arrays.obs, 0)
        self._casts: set[str] = set()
        self._bounds: dict[str, str] = {}  # leaf -> remark

    def __call__(self, obs: Any, method: str) -> None:
        """``method``: the one that returned it."""
        try:
            write_value(self._view, obs, self._casts)
            self._check_bounds(self._space, obs, "")
        except (TypeError, ValueError) as error:
            place = place_of(error) or _place(self._env, method)
            raise type(error)(f"{first_line(error, n_lines=5)}{place}") from error

    def _check_bounds(self, space: AnySpace, obs: Any, leaf: str) -> None:
        if isinstance(space, spaces.Dict):
            for key, part in space.spaces.items():
                self._check_bounds(part, obs[key], f"{leaf}[{key!r}]")
        elif isinstance(space, spaces.Tuple):
            for index, part in enumerate(space.spaces):
                self._check_bounds(part, obs[index], f"{leaf}[{index}]")
        elif isinstance(space, spaces.Box):
            array = np.asarray(obs)
            if not (self.allow_nonfinite or np.isfinite(array).all()):
                bad = array[~np.isfinite(array)][0]
                raise ValueError(f"observation{leaf} has the value {bad}, not finite")
            outside = (array < space.low) | (array > space.high)
            if leaf not in self._bounds and outside.any():
                where = tuple(np.argwhere(outside)[0]) if array.ndim else ()
                self._bounds[leaf] = (
                    f"observation{leaf} has the value {array[where]:g}, but its space has the "
                    f"bounds {space.low[where]:g} to {space.high[where]:g}; correct one of them"
                )
        elif not space.contains(obs):
            raise ValueError(f"observation{leaf} is {obs!r}, which is not in {space}")

    def remarks(self) -> list[str]:
        return [*sorted(self._casts), *self._bounds.values()]
