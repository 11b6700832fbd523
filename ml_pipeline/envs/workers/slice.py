"""EnvSlice: some envs of a vector env, stepped one after the other in one process.

A worker runs one slice. ``SerialEnv`` and ``main_slice`` run one in the main process. All use
this code, so they behave the same. Spawned workers import this module: keep torch out of it.
"""

from __future__ import annotations

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, AnySpace, Info
from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot
from ml_pipeline.envs.workers.errors import WorkerError, error_from
from ml_pipeline.envs.workers.lazy_infos import PackedInfo, packed
from ml_pipeline.envs.workers.shared_arrays import EnvArrays
from ml_pipeline.envs.workers.trees import (
    Tree,
    has_only_numbers,
    is_finite,
    objects_of,
    put_objects,
    read_row,
    scalars_of,
    take_objects,
    view_of_row,
    write_value,
)

EnvFn = Callable[[], AnyEnv]
InfoMode = Literal["all", "final"]


class SliceOptions(NamedTuple):
    """How a slice treats its envs; the same for all slices of a vector env."""

    autoreset_mode: AutoresetMode
    infos: InfoMode  # "final": only those of resets and ended episodes
    check_finite: bool


class Description(NamedTuple):
    """The facts about an env that a vector env needs before the first reset."""

    observation_space: AnySpace
    action_space: AnySpace
    metadata: dict[str, object]
    render_mode: str | None
    spec: EnvSpec | None


# Plain tuples, because they are pickled during a step.
# StepInfo: index of the env, last observation and info of an episode that ended in this step, info
# that belongs to the observation, packed if it holds only floats. The last observation is None if
# it is in the arrays as the env returned it; a single number is not, because the arrays do not tell
# an int from a NumPy integer.
StepInfo = tuple[int, object, Info, PackedInfo | Info]
# SliceReport: infos, objects of the observations, objects of the final observations (see
# take_objects), and casts to warn about. A slice with nothing to report sends None.
SliceReport = tuple[list[StepInfo], list[list[object]], list[list[object]], list[str]]


class EnvSlice:
    """Envs, and the rows of the shared arrays that they read and write."""

    def __init__(self, options: SliceOptions, *, in_worker: bool = False) -> None:
        self.options = options
        self._in_worker = in_worker
        self._kept: Callable[[Info], PackedInfo | Info] = packed if in_worker else dict
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._all_infos = options.infos == "all"
        self._check_finite = options.check_finite
        self.rows: list[int] = []  # index of each env in the vector env
        self.envs: list[AnyEnv] = []
        self.seeds: list[int | None] = []  # the last seed of each env, for error messages
        self._ended: list[bool] = []
        self._casts: set[str] = set()
        self._reported_casts: set[str] = set()
        self._arrays: EnvArrays
        self._is_bound = False
        self._running = memoryview(bytearray(8)).cast("q")  # index + 1 of the env that runs now
        self._reward: memoryview[Any]
        self._terminated: memoryview[Any]
        self._truncated: memoryview[Any]
        self._sends_objects = False
        self._sends_final_obs = False
        self._scalar_actions: NDArray[np.generic] | None = None
        self._obs_views: list[Tree] = []
        self._final_obs_views: list[Tree] = []

    def build(
        self, env_fns: Sequence[EnvFn], rows: Sequence[int], seeds: Sequence[int | None]
    ) -> list[Description]:
        """Add envs; call ``bind`` before the next step."""
        descriptions: list[Description] = []
        for env_fn, row, seed in zip(env_fns, rows, seeds, strict=True):
            self.rows.append(row)
            self.seeds.append(seed)
            self._ended.append(False)
            try:
                env = env_fn()
                if not isinstance(env, gym.Env):
                    raise TypeError(
                        f"the factory returned {type(env).__name__}, not a gymnasium.Env"
                    )
                self.envs.append(env)
                spaces = env.observation_space, env.action_space
                if descriptions and spaces == descriptions[0][:2]:
                    spaces = descriptions[0][:2]  # pickle writes the same object only once
                descriptions.append(Description(*spaces, env.metadata, env.render_mode, env.spec))
            except BaseException as error:
                self._raise_for_env(len(self.rows) - 1, error)
        return descriptions

    def drop(self, n_envs: int) -> None:
        """Close the envs from row ``n_envs`` on."""
        keep = sum(row < n_envs for row in self.rows)
        for offset in range(keep, len(self.envs)):
            self._close_env(offset)
        for each in (self.envs, self.rows, self.seeds, self._ended):
            del each[keep:]

    def bind(self, arrays: EnvArrays, running: memoryview[int] | None = None) -> None:
        """Use these arrays from now on; must be called again whenever the envs change.

        ``running``: a word in which another process can see which env runs.
        """
        self._running = self._running if running is None else running
        if self._is_bound:
            # The main process copies the arrays; objects are in lists of this process.
            kept = [row for row in self.rows if row < len(self._arrays.reward)]
            put_objects(arrays.obs, kept, take_objects(self._arrays.obs, kept))
        self._arrays = arrays
        self._is_bound = True
        self._obs_views = [view_of_row(arrays.obs, row) for row in self.rows]
        self._final_obs_views = [view_of_row(arrays.final_obs, row) for row in self.rows]
        self._sends_objects = any(objects_of(arrays.obs))
        self._sends_final_obs = has_only_numbers(arrays.final_obs)
        self._scalar_actions = scalars_of(arrays.action, self.rows)
        # To read or write one number, a memoryview is faster than an array.
        self._reward = arrays.reward.data
        self._terminated = arrays.terminated.data
        self._truncated = arrays.truncated.data

    def reset(
        self,
        seeds: Sequence[int | None],
        options: Info | None,
        mask: Sequence[bool],
    ) -> SliceReport | None:
        """Reset the envs whose ``mask`` is set; ``seeds`` and ``mask`` cover this slice only."""
        infos: list[StepInfo] = []
        offset = 0
        try:
            for offset, seed in enumerate(seeds):
                if mask[offset]:
                    self._running[0] = self.rows[offset] + 1
                    self.seeds[offset] = self.seeds[offset] if seed is None else seed
                    self._reset_env(offset, infos, seed=seed, options=deepcopy(options))
        except BaseException as error:
            self._raise_for_env(offset, error)
        return self._report(infos)

    def step(self, given: Sequence[object] | None = None) -> SliceReport | None:
        """Step every env with its row of the actions, or with its action in ``given``."""
        infos: list[StepInfo] = []
        rows, ended, obs_views, reward_of = self.rows, self._ended, self._obs_views, self._reward
        terminated_of, truncated_of, running = self._terminated, self._truncated, self._running
        offset = 0
        try:
            for offset, action in enumerate(self._actions() if given is None else given):
                row = rows[offset]
                running[0] = row + 1
                if ended[offset]:
                    self._start_next_episode(offset, infos)
                    continue
                obs, reward, terminated, truncated, info = self.envs[offset].step(action)
                reward_of[row] = reward if isinstance(reward, float) else as_number(reward)
                if terminated is False and truncated is False:
                    terminated_of[row] = truncated_of[row] = False
                    if info and self._all_infos:
                        infos.append((row, None, {}, self._kept(info)))
                else:
                    obs = self._handle_flags(offset, terminated, truncated, obs, info, infos)
                write_value(obs_views[offset], obs, self._casts)
                if self._check_finite:
                    self._require_finite(offset)
        except BaseException as error:
            self._raise_for_env(offset, error)
        return self._report(infos)

    def _actions(self) -> list[object]:
        """One action per env, copied: an env may keep it."""
        if self._scalar_actions is not None:
            return list(self._scalar_actions)
        return [read_row(self._arrays.action, row) for row in self.rows]

    def _handle_flags(
        self,
        offset: int,
        terminated: object,
        truncated: object,
        obs: object,
        info: Info,
        infos: list[StepInfo],
    ) -> object:
        """Store the flags and autoreset an ended episode; returns the observation to show."""
        row = self.rows[offset]
        self._terminated[row] = as_flag(terminated, "terminated")
        self._truncated[row] = as_flag(truncated, "truncated")
        if not (self._terminated[row] or self._truncated[row]):
            if info and self._all_infos:
                infos.append((row, None, {}, self._kept(info)))
        elif self._same_step:
            # Copy before the reset: an env may reuse the buffers of observation and info.
            write_value(self._final_obs_views[offset], obs, self._casts)
            final_info = _copied(info) if info else {}
            final_obs = deepcopy(obs) if self._sends_final_obs else None
            obs, info = self.envs[offset].reset()
            if info or final_info or self._sends_final_obs:
                infos.append((row, final_obs, final_info, dict(info)))
        else:
            self._ended[offset] = True
            if info:
                infos.append((row, None, {}, dict(info)))
        return obs

    def _start_next_episode(self, offset: int, infos: list[StepInfo]) -> None:
        if self.options.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(
                "autoreset_mode=DISABLED: the episode has ended; reset this env with "
                "options={'reset_mask': mask} before the next step"
            )
        self._reset_env(offset, infos)

    def _reset_env(self, offset: int, infos: list[StepInfo], **arguments: Any) -> None:
        row = self.rows[offset]
        obs, info = self.envs[offset].reset(**arguments)
        write_value(self._obs_views[offset], obs, self._casts)
        self._ended[offset] = False
        self._reward[row] = 0.0
        self._terminated[row] = self._truncated[row] = False
        if self._check_finite:
            self._require_finite(offset)
        if info:
            infos.append((row, None, {}, dict(info)))

    def _require_finite(self, offset: int) -> None:
        row = self.rows[offset]
        if not math.isfinite(self._reward[row]):
            raise ValueError(f"the env returned reward={self._reward[row]}, which is not finite")
        seen = [(self._arrays.obs, self._obs_views)]
        if self._same_step and (self._terminated[row] or self._truncated[row]):
            seen.append((self._arrays.final_obs, self._final_obs_views))
        for tree, views in seen:
            if not is_finite(views[offset]):
                obs = read_row(tree, row)
                raise ValueError(f"the env returned an observation that is not finite: {obs}")

    def _report(self, infos: list[StepInfo]) -> SliceReport | None:
        casts = self._new_casts() if self._casts else []
        if self._sends_objects:
            arrays, rows = self._arrays, self.rows
            objects = take_objects(arrays.obs, rows), take_objects(arrays.final_obs, rows)
            return infos, *objects, casts
        return (infos, [], [], casts) if infos or casts else None

    def _new_casts(self) -> list[str]:
        new = sorted(self._casts - self._reported_casts)
        self._reported_casts |= self._casts
        self._casts.clear()
        return new

    def ping(self) -> None:
        """Do nothing; the answer shows that the worker is alive."""

    def end_episodes(self) -> None:
        """Treat every episode as ended; the next step starts a new one."""
        self._ended = [True] * len(self.envs)

    def snapshot(self) -> list[bytes]:
        """The state of each env between two steps."""
        taken = []
        for offset, env in self._each():
            try:
                taken.append(take_snapshot(env, read_row(self._arrays.obs, self.rows[offset])))
            except BaseException as error:
                self._raise_for_env(offset, error)
        return taken

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Continue from snapshots of envs that were made by the same factories."""
        for offset, env in self._each():
            try:
                self.envs[offset], obs = restore_snapshot(env, snapshots[offset])
                write_value(self._obs_views[offset], obs, self._casts)
            except BaseException as error:
                self._raise_for_env(offset, error)
        self._ended = [False] * len(self.envs)

    def call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
        """The attribute ``name`` of each env, called if it is callable."""
        results = []
        for offset, env in self._each():
            try:
                attribute = env.get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except BaseException as error:
                self._raise_for_env(offset, error)
        return results

    def set_attributes(self, values: Sequence[dict[str, object]]) -> None:
        """Set the attributes of each env; ``values`` has one dict per env."""
        for offset, env in self._each():
            try:
                for name, value in values[offset].items():
                    env.set_wrapper_attr(name, value)
            except BaseException as error:
                self._raise_for_env(offset, error)

    def _each(self) -> Iterator[tuple[int, AnyEnv]]:
        """The envs one after the other, each with its place in the slice."""
        for offset, env in enumerate(self.envs):
            self._running[0] = self.rows[offset] + 1
            yield offset, env

    def close(self) -> None:
        """Close every env; an env that raises causes a warning and does not stop the others."""
        for offset in range(len(self.envs)):
            self._close_env(offset)

    def _close_env(self, offset: int) -> None:
        try:
            self.envs[offset].close()
        except (Exception, SystemExit) as error:
            with contextlib.suppress(RuntimeWarning):  # python -W error must not stop a close
                message = str(self._error_of_env(offset, error))
                warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _raise_for_env(self, offset: int, error: BaseException) -> NoReturn:
        """Raise a ``WorkerError`` that names the env; in the main process, re-raise interrupts."""
        if not (self._in_worker or isinstance(error, (Exception, SystemExit))):
            raise error
        raise self._error_of_env(offset, error) from error

    def _error_of_env(self, offset: int, error: BaseException) -> WorkerError:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return error_from(error, f"{self.name_of(self.rows[offset])} raised:\n{trace}")

    def name_of(self, row: int) -> str:
        return f"env {row} (seed {self.seeds[self.rows.index(row)]})"


def _copied(info: Info) -> Info:
    try:
        return deepcopy(info)
    except Exception:  # an object that cannot be copied; a worker reports it when it is pickled
        return dict(info)


def as_flag(value: Any, name: str) -> bool:
    if isinstance(value, (bool, np.bool_)) or (np.ndim(value) == 0 and value in (0, 1)):
        return bool(value)
    raise TypeError(f"the env returned {name}={value!r}, which is not a bool")


def as_number(value: Any) -> float:
    if value is None or isinstance(value, str) or np.ndim(value) > 1 or np.size(value) != 1:
        kind = type(value).__name__
        raise TypeError(f"the env returned reward={value!r} of {kind}, which is not a number")
    return float(np.asarray(value).reshape(()))
