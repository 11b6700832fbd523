"""SliceVectorEnv: what SerialEnv and ParallelEnv share, Gymnasium's side of a vector env.

It knows seeds, arrays and infos, and that the envs are in slices: one in this process, the others
in the workers of a pool; either may be absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ml_pipeline.envs.workers.pool import CLOSE_SECONDS, AnswerPendingError, Worker, WorkerPool
from ml_pipeline.envs.workers.shared_arrays import (
    EnvArrays,
    Layout,
    SharedBlock,
    choices_of,
    copy_rows,
    hand_out,
    is_finite,
    objects_of,
    put_objects,
    read_row,
    take_objects,
    write_all,
)
from ml_pipeline.envs.workers.worker import (
    STEP,
    Description,
    EnvFn,
    EnvSlice,
    InfoMode,
    SliceOptions,
    SliceReport,
    StepInfo,
    WorkerError,
)

Seeds = list[int | None]
StepResult = tuple[
    Any, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]
]

_ResetRequest = tuple[Seeds, "dict[str, Any] | None", list[bool]]  # seeds, options, mask

_RESERVED = ("reset", "step", "close")  # not to be had by ``call``: the arrays would not know


class SliceVectorEnv(VectorEnv[Any, Any, Any]):
    """The contract of a VectorEnv over a main slice and a pool of workers."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        seed: int | None,
        options: SliceOptions,
        *,
        copy: bool,
        pool: WorkerPool | None,
    ) -> None:
        self.env_fns = list(env_fns)
        if not self.env_fns:
            raise ValueError("env_fns is empty; give at least one env factory")
        self.autoreset_mode = options.autoreset_mode
        self.copy = copy
        self._options = options
        self._first_seed = None if seed is None else int(seed)  # of env 0; env i has this + i
        self._seeds = spread_seed(seed, len(self.env_fns))  # what each env was last seeded with
        self._unused_seeds = list(self._seeds)  # by a first reset that brings no seed of its own
        self._main: EnvSlice | None = None
        self._pool = pool
        self._workers: list[Worker] = pool.workers if pool is not None else []
        self._block: SharedBlock | None = None
        self._arrays: EnvArrays
        self._pending: str | None = None  # reset, step or call, between its async and its wait
        self._main_result: list[Any] | None = None  # what the slice here has done of it
        self._main_request: tuple[str, tuple[Any, ...]] = ("step", ())
        self._cut_short = False
        self._reset_request: _ResetRequest = (self._seeds, None, [True] * len(self._seeds))
        self._casts_told: set[str] = set()
        self._last_obs: Any = None  # where workers are restarted: what was last handed out

    def _adopt(self, descriptions: Sequence[Description]) -> None:
        """Take over spaces and metadata; all envs must agree on the spaces."""
        first = descriptions[0]
        self.num_envs = len(descriptions)
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        for index, description in enumerate(descriptions):
            self._check_spaces(description, index)
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self._choices = choices_of(first.action_space)
        self._sends_objects = any(objects_of(Layout(*self._spaces(), 1, 0).arrays().action))
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.spec = first.spec

    def _spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        return self.single_observation_space, self.single_action_space

    def _check_spaces(self, description: Description, index: int) -> None:
        for name in ("observation_space", "action_space"):
            theirs, ours = getattr(description, name), getattr(self, f"single_{name}")
            if theirs != ours:
                raise WorkerError(
                    f"env {index} has {name} {theirs}, "
                    f"but env 0 has {ours}; all envs must share one"
                )

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those in ``options["reset_mask"]``; an int seeds env i seed + i."""
        try:
            self.reset_async(seed=seed, options=options)
            return self.reset_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._check_idle("reset")
        options = dict(options) if options is not None else None
        mask = [True] * self.num_envs
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self.num_envs).tolist()
        seeds = self._unused_seeds if seed is None else spread_seed(seed, self.num_envs)
        seeds = [each if chosen else None for each, chosen in zip(seeds, mask, strict=True)]
        self._begin(
            "reset", "reset", lambda rows: (picked(seeds, rows), options, picked(mask, rows))
        )
        self._reset_request = (seeds, options, mask)
        if isinstance(seed, (int, np.integer)) and all(mask):
            self._first_seed = int(seed)
        for index, new in enumerate(seeds):
            self._seeds[index] = self._seeds[index] if new is None else new
            self._unused_seeds[index] = None if mask[index] else self._unused_seeds[index]
        self._cut_short = self._cut_short and not all(mask)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        infos = self._merge(self._finish("reset", timeout), may_have_ended=False)
        return self._hand_out(), infos

    def step(self, actions: Any) -> StepResult:
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def step_async(self, actions: Any) -> None:
        """Let the envs start on ``actions``; they are checked before anything is sent."""
        self._check_idle("step_async")
        if self._cut_short:
            raise WorkerError(
                "the last step was interrupted and what it brought is lost; reset all envs first"
            )
        if self._pool is not None:
            self._pool.settle(self._workers)
        action = self._arrays.action
        write_all(action, actions, self._choices)
        if self._options.check_finite and not is_finite(action):
            raise ValueError(f"the actions are not finite: {actions}")
        if self._pool is not None:
            payloads = [b""] * len(self._workers)
            if self._sends_objects:
                objects = [take_objects(action, worker.rows) for worker in self._workers]
                payloads = [cloudpickle.dumps(each) for each in objects]
            self._cut_short = True  # by whatever comes before all are asked
            number, seconds = self._pool.next_number(), self._pool.answer_seconds
            for worker, payload in zip(self._workers, payloads, strict=True):
                worker.send(STEP, number, payload, seconds)
            self._cut_short = False
        self._main_request = ("step", ())
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """``WorkerTimeoutError`` after ``timeout`` seconds; the step can still be waited for."""
        outcomes = self._finish("step", timeout)
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        infos = self._merge(outcomes, may_have_ended=same_step)
        arrays = self._arrays
        return (
            self._hand_out(),
            arrays.reward.copy(),
            arrays.terminated.copy(),
            arrays.truncated.copy(),
            infos,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Each env's attribute ``name``, called with the arguments if it is a method."""
        try:
            self.call_async(name, *args, **kwargs)
            return self.call_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self._check_idle("call")
        if name in _RESERVED:
            raise ValueError(f"call({name!r}) would pass by the vector env; use its own {name}")
        self._begin("call", "call", lambda rows: (name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        return tuple(self._per_env(self._finish("call", timeout)))

    def snapshot(self) -> list[bytes]:
        """Each env as bytes, between two steps: see ``ml_pipeline.envs.snapshots``."""
        self._check_idle("snapshot")
        self._begin("call", "snapshot", lambda rows: ())
        return self._per_env(self._finish("call", None))

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Go on in the midst of episodes, instead of a reset; loading a snapshot runs its code."""
        self._check_idle("restore")
        if len(snapshots) != self.num_envs:
            raise ValueError(f"{len(snapshots)} snapshots given for {self.num_envs} envs")
        self._begin("call", "restore", lambda rows: (picked(snapshots, rows),))
        self._finish("call", None)
        if self._last_obs is not None:
            copy_rows(self._arrays.obs, self._last_obs, range(self.num_envs))
        self._unused_seeds = [None] * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of every env; a list or tuple holds one value per env."""
        self._check_idle("set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values given for {self.num_envs} envs")
        self._begin("call", "set_attr", lambda rows: (name, [values[i] for i in rows]))
        self._finish("call", None)

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property  # type: ignore[misc]  # one per env and not to be set, as in Gymnasium's own
    def np_random(self) -> Any:
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        return self.get_attr("np_random_seed")

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs; a worker that takes longer than ``timeout`` (2 s) is ended.

        With ``terminate`` the workers are ended at once.
        """
        try:
            if self._pool is not None:
                seconds = CLOSE_SECONDS if timeout is None else timeout
                self._pool.end(0.0 if terminate else seconds)
        finally:
            if self._main is not None:
                self._main.close()
            if self._block is not None:
                self._block.close()

    # How requests are run: by the workers, and meanwhile by the slice of this process.

    def _begin(
        self, pending: str, method: str, arguments_of: Callable[[list[int]], tuple[Any, ...]]
    ) -> None:
        """Ask every slice for ``method``, with the arguments for its rows."""
        if self._pool is not None:
            arguments = [arguments_of(worker.rows) for worker in self._workers]
            self._pool.request(self._workers, method, arguments)
        if self._main is not None:
            self._main_request = (method, arguments_of(self._main.rows))
        self._pending = pending

    def _finish(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        """What the slices have brought, each with its rows."""
        self._check_open()
        if self._pending != pending:
            raise NoAsyncCallError(f"{pending}_wait without a {pending}_async before it", pending)
        try:
            results: list[tuple[list[int], Any]] = []
            if self._main is not None:
                if self._main_result is None:
                    method, arguments = self._main_request
                    self._main_result = [getattr(self._main, method)(*arguments)]
                results.append((self._main.rows, self._main_result[0]))
            results += self._workers_results(pending, timeout)
        except AnswerPendingError:
            raise  # it can be waited for again
        except BaseException as error:
            self._pending = self._main_result = None
            self._cut_short = not isinstance(error, WorkerError) and pending != "call"
            raise
        self._pending = self._main_result = None
        return results

    def _abandon(self, error: BaseException) -> None:
        """Nobody will wait any more for what an interrupt has left pending."""
        if not isinstance(error, Exception) and self._pending is not None:
            self._cut_short = self._cut_short or self._pending != "call"
            self._pending = self._main_result = None

    def _workers_results(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        if self._pool is None:
            return []
        results = self._pool.results(self._workers, patience=timeout)
        return [
            (worker.rows, result) for worker, result in zip(self._workers, results, strict=True)
        ]

    def _per_env(self, results: list[tuple[list[int], Any]]) -> list[Any]:
        """One item per env, in the order of the envs."""
        found: list[Any] = [None] * sum(len(rows) for rows, _ in results)
        for rows, items in results:
            for row, item in zip(rows, items, strict=True):
                found[row] = item
        return found

    def _merge(
        self, outcomes: list[tuple[list[int], SliceReport | None]], *, may_have_ended: bool
    ) -> dict[str, Any]:
        """The infos of all envs as Gymnasium gives them."""
        arrays = self._arrays
        told: list[StepInfo] = []
        for rows, outcome in outcomes:
            if outcome is None:
                continue
            step_infos, obs_objects, final_obs_objects, casts = outcome
            told += step_infos
            if obs_objects:
                put_objects(arrays.obs, rows, obs_objects)
                put_objects(arrays.final_obs, rows, final_obs_objects)
            for cast in set(casts) - self._casts_told:
                self._casts_told.add(cast)
                warnings.warn(cast, UserWarning, stacklevel=4)
        told.sort(key=itemgetter(0))
        infos: dict[str, Any] = {}
        flags = arrays.terminated.tobytes() + arrays.truncated.tobytes()
        if may_have_ended and b"\x01" in flags:
            infos = self._final_infos({index: info for index, info, _ in told if info})
        for index, _, info in told:
            if info:
                infos = self._add_info(infos, info, index)
        return infos

    def _final_infos(self, told: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What ``_add_info`` makes of final_obs and final_info, in one go: it is often needed."""
        mask = self._arrays.terminated | self._arrays.truncated
        final_obs = np.empty(self.num_envs, dtype=object)  # of None
        final_info: dict[str, Any] = {}
        for index in np.flatnonzero(mask).tolist():
            final_obs[index] = read_row(self._arrays.final_obs, index)
            if index in told:
                final_info = self._add_info(final_info, told[index], index)
        return {
            "final_obs": final_obs,
            "_final_obs": mask,
            "final_info": final_info,
            "_final_info": mask.copy(),
        }

    def _hand_out(self) -> Any:
        if self._last_obs is not None:
            copy_rows(self._arrays.obs, self._last_obs, range(self.num_envs))
        return hand_out(self._arrays.obs, copy=self.copy)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed; make a new one")
        if self._pool is not None and not self._pool.is_own():
            raise WorkerError(
                "this process is a forked copy of the one that made the env, and its workers "
                "answer to that one only; make an env here"
            )

    def __reduce__(self) -> Any:
        """Copying and pickling would share running envs between two owners."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make a new one")

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"{name} while a {self._pending} is pending; {self._pending}_wait first",
                self._pending,
            )


def picked(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [items[index] for index in indices]


def slice_options(
    autoreset_mode: AutoresetMode | str, infos: InfoMode, check_finite: bool
) -> SliceOptions:
    if infos not in ("all", "final"):
        raise ValueError(f"infos is all or final, got {infos!r}")
    return SliceOptions(AutoresetMode(autoreset_mode), infos, check_finite)


def spread_seed(seed: int | Sequence[int | None] | None, n_envs: int) -> Seeds:
    if seed is None:
        return [None] * n_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(n_envs)]
    if len(seed) != n_envs:
        raise ValueError(f"{len(seed)} seeds given for {n_envs} envs")
    return [None if each is None else int(each) for each in seed]


def _checked_mask(mask: Any, n_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {mask!r}")
    if mask.shape != (n_envs,) or not mask.any():
        raise ValueError(
            f"options['reset_mask'] must have shape ({n_envs},) and one True at least, got {mask}"
        )
    return mask
