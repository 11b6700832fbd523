"""SliceVectorEnv: the gymnasium ``VectorEnv`` that SerialEnv and ParallelEnv share.

It handles seeds, arrays and infos. The envs are in slices: one in this process, the others in the
workers of a pool. Either may be absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn, TypeVar

import cloudpickle
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyVectorEnv, Info
from ml_pipeline.envs.workers.env_spaces import EnvSpaces, ObservationMode
from ml_pipeline.envs.workers.errors import AnswerPendingError, WorkerError
from ml_pipeline.envs.workers.handle import CLOSE_SECONDS, WorkerHandle
from ml_pipeline.envs.workers.lazy_infos import LazyInfos, can_wait, joined, unpacked
from ml_pipeline.envs.workers.pool import WorkerPool
from ml_pipeline.envs.workers.seeds import EnvSeeds, Seeds
from ml_pipeline.envs.workers.shared_arrays import EnvArrays, Layout, SharedBlock
from ml_pipeline.envs.workers.slice import (
    Description,
    EnvFn,
    EnvSlice,
    SliceOptions,
    SliceReport,
    StepInfo,
)
from ml_pipeline.envs.workers.trees import (
    Tree,
    as_batch,
    choices_of,
    is_finite,
    put_objects,
    read_row,
    write_all,
)
from ml_pipeline.signals import raise_swallowed

# Returned by VectorEnv.step: obs, reward, terminated, truncated, infos.
StepTuple = tuple[Tree, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", Info]
# What a caller may give as the seed of a reset.
SeedLike = int | Sequence[int | None] | None

Item = TypeVar("Item")

_RESERVED = ("reset", "step", "close")  # ``call`` refuses them: they must update the arrays
_MOVES_ENVS = ("reset", "step")  # requests whose results cannot be requested again


class SliceVectorEnv(AnyVectorEnv):
    """A VectorEnv over one slice in this process and a pool of workers."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        seed: int | None,
        options: SliceOptions,
        *,
        copy: bool,
        observation_mode: ObservationMode,
        pool: WorkerPool | None,
    ) -> None:
        self.env_fns = list(env_fns)
        if not self.env_fns:
            raise ValueError("env_fns is empty; give at least one env factory")
        if options.infos not in ("all", "final"):
            raise ValueError(f"infos={options.infos!r}: must be 'all' or 'final'")
        self.autoreset_mode = options.autoreset_mode
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self.copy = copy
        self.observation_mode = observation_mode
        self._spaces = EnvSpaces(observation_mode)
        self._options = options
        self._seeds = EnvSeeds(seed, len(self.env_fns))
        self._main: EnvSlice | None = None
        self._pool = pool
        self._workers: list[WorkerHandle] = pool.workers if pool is not None else []
        self._block: SharedBlock | None = None
        self._arrays: EnvArrays
        self._pending: str | None = None  # reset, step, call or set_attr, until its result is here
        self._main_call: Callable[[], object] | None = None  # what the own slice has yet to do
        self._main_results: list[tuple[list[int], Any]] = []  # of the own slice: none or one
        self._is_interrupted = False  # the envs were stepped, but the results are lost
        self._reset_seeds: Seeds = []  # of the last reset
        self._reset_options: Info | None = None
        self._reported_casts: set[str] = set()

    def _adopt(self, descriptions: Sequence[Description]) -> None:
        """Use the metadata of env 0, and spaces that fit all envs."""
        first = descriptions[0]
        self.num_envs = len(descriptions)
        for description in descriptions:
            self._spaces.add(description.observation_space, description.action_space)
        self._use_spaces()
        self._choices = choices_of(first.action_space)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.spec = first.spec

    def _use_spaces(self) -> None:
        self.observation_space, self.single_observation_space = self._spaces.observation()
        self.action_space, self.single_action_space = self._spaces.action()

    def _layout_for(self, n_envs: int, n_workers: int) -> Layout:
        return Layout(self.single_observation_space, self.single_action_space, n_envs, n_workers)

    def reset(self, *, seed: SeedLike = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all envs, or those in ``options["reset_mask"]``; an int seeds env i seed + i."""
        try:
            self.reset_async(seed=seed, options=options)
            return self.reset_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def reset_async(self, seed: SeedLike = None, options: Info | None = None) -> None:
        self._check_idle("reset")
        options = dict(options) if options is not None else None
        mask = [True] * self.num_envs
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self.num_envs).tolist()
        seeds = self._seeds.for_reset(seed, mask)
        self._begin(
            "reset", "reset", lambda rows: (picked(seeds, rows), options, picked(mask, rows))
        )
        self._reset_seeds, self._reset_options = seeds, options
        self._seeds.mark_used(seed, seeds, mask)
        self._is_interrupted = self._is_interrupted and not all(mask)

    def reset_wait(self, timeout: float | None = None) -> tuple[Tree, Info]:
        infos = self._merge(self._finish("reset", timeout), may_have_ended=False)
        return self._observations(), infos

    def step(self, actions: Any) -> StepTuple:
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def step_async(self, actions: Any) -> None:
        """Start a step; the actions are checked before anything is sent."""
        self._check_idle("step_async")
        if self._is_interrupted:
            raise WorkerError("the last step was interrupted and its results are lost; reset first")
        if self._pool is not None:
            self._pool.settle(self._workers)
        action = self._arrays.action
        is_stored = write_all(action, actions, self._choices)
        if self._options.check_finite and not is_finite(action):
            raise ValueError(f"the actions are not finite: {actions}")
        given = None if is_stored else list(iterate(self.action_space, actions))
        if self._pool is not None:
            payloads = None
            if given is not None:
                payloads = [cloudpickle.dumps(picked(given, each.rows)) for each in self._workers]
            self._is_interrupted = True  # if an interrupt comes before all workers are asked
            self._pool.send_step(payloads)
            self._is_interrupted = False
        if self._main is not None:
            own = None if given is None else deepcopy(picked(given, self._main.rows))
            self._main_call = partial(self._main.step, own)
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> StepTuple:
        """Raises ``AnswerPendingError`` after ``timeout`` seconds; then it can be called again."""
        reports = self._finish("step", timeout)
        infos = self._merge(reports, may_have_ended=self._same_step)
        arrays = self._arrays
        return (
            self._observations(),
            arrays.reward.copy(),
            arrays.terminated.copy(),
            arrays.truncated.copy(),
            infos,
        )

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """The attribute ``name`` of each env, called with the arguments if it is a method."""
        try:
            self.call_async(name, *args, **kwargs)
            return self.call_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        self._check_idle("call")
        if name in _RESERVED:
            raise ValueError(f"call({name!r}) would bypass the vector env; use its own {name}()")
        self._begin("call", "call", lambda rows: (name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        return tuple(self._per_env(self._finish("call", timeout)))

    def snapshot(self) -> list[bytes]:
        """Each env as bytes, between two steps: see ``ml_pipeline.envs.snapshots``."""
        self._check_idle("snapshot")
        self._begin("call", "snapshot", lambda rows: ())
        return self._per_env(self._finish("call", None))

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Continue the episodes of ``snapshots``, without a reset; loading one runs its code."""
        self._check_idle("restore")
        if len(snapshots) != self.num_envs:
            raise ValueError(f"{len(snapshots)} snapshots given for {self.num_envs} envs")
        self._begin("call", "restore", lambda rows: (picked(snapshots, rows),))
        self._finish("call", None)
        self._seeds.discard_unused()

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of every env; a list or tuple holds one value per env."""
        self._check_idle("set_attr")
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"{len(each)} values given for {self.num_envs} envs")
        self._set_attributes([{name: value} for value in each])

    def _set_attributes(self, attributes: list[dict[str, object]]) -> None:
        self._begin("set_attr", "set_attributes", lambda rows: (picked(attributes, rows),))
        self._finish("set_attr", None)

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property  # type: ignore[misc]  # one per env and read-only, as in Gymnasium's own
    def np_random(self) -> Any:
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        return self.get_attr("np_random_seed")

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs; a worker that needs longer than ``timeout`` (2 s) is killed.

        With ``terminate`` the workers are killed at once.
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

    # The workers and the slice of this process run a request at the same time.

    def _begin(
        self, pending: str, method: str, arguments_of: Callable[[list[int]], tuple[object, ...]]
    ) -> None:
        """Call ``method`` of every slice, with the arguments for its rows."""
        if self._pool is not None:
            arguments = [arguments_of(worker.rows) for worker in self._workers]
            self._pool.request(self._workers, method, arguments)
        if self._main is not None:
            self._main_call = partial(getattr(self._main, method), *arguments_of(self._main.rows))
        self._pending = pending

    def _finish(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        """The rows and the result of each slice."""
        self._check_open()
        if self._pending != pending:
            raise NoAsyncCallError(f"{pending}_wait was called before {pending}_async", pending)
        try:
            if self._main is not None and self._main_call is not None:
                self._main_results = [(self._main.rows, self._main_call())]
                raise_swallowed()
                self._main_call = None
            results = self._main_results + self._workers_results(pending, timeout)
        except AnswerPendingError:
            raise  # still pending
        except BaseException as error:
            self._pending = None
            self._is_interrupted = not isinstance(error, WorkerError) and pending in _MOVES_ENVS
            raise
        self._pending = None
        return results

    def _abandon(self, error: BaseException) -> None:
        """Drop the pending result after an interrupt; no caller waits for it."""
        if not isinstance(error, Exception) and self._pending is not None:
            self._is_interrupted = self._is_interrupted or self._pending in _MOVES_ENVS
            self._pending = None

    def _workers_results(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        """The rows and the result of each worker; without workers there are none."""
        return []

    def _per_env(self, results: list[tuple[list[int], Any]]) -> list[Any]:
        """One item per env, in the order of the envs."""
        found: list[Any] = [None] * sum(len(rows) for rows, _ in results)
        for rows, items in results:
            for row, item in zip(rows, items, strict=True):
                found[row] = item
        return found

    def _merge(
        self, reports: list[tuple[list[int], SliceReport | None]], *, may_have_ended: bool
    ) -> Info:
        """The infos of all envs, in Gymnasium's format."""
        arrays = self._arrays
        step_infos: list[StepInfo] = []
        for rows, report in reports:
            if report is None:
                continue
            new_infos, obs_objects, final_obs_objects, casts = report
            step_infos += new_infos
            if obs_objects:
                put_objects(arrays.obs, rows, obs_objects)
                put_objects(arrays.final_obs, rows, final_obs_objects)
            for cast in set(casts) - self._reported_casts:
                self._reported_casts.add(cast)
                warnings.warn(cast, UserWarning, stacklevel=4)
        step_infos.sort(key=itemgetter(0))
        infos: Info = {}
        if may_have_ended and b"\x01" in arrays.terminated.tobytes() + arrays.truncated.tobytes():
            infos = self._final_infos(step_infos)
        elif step_infos and all(can_wait(info) for _, _, _, info in step_infos):
            kept = [(row, info) for row, _, _, info in step_infos]
            return LazyInfos(partial(joined, kept, self.num_envs))
        for row, _, _, info in step_infos:
            if info:
                infos = self._add_info(infos, unpacked(info), row)
        return infos

    def _final_infos(self, step_infos: list[StepInfo]) -> Info:
        """The same as ``_add_info`` for final_obs and final_info, but faster."""
        arrays = self._arrays
        mask = arrays.terminated | arrays.truncated
        final_obs = np.empty(len(mask), dtype=object)  # filled with None
        for row in mask.nonzero()[0].tolist():
            final_obs[row] = read_row(arrays.final_obs, row)
        final_info: Info = {}
        for row, obs, info, _ in step_infos:
            if obs is not None:
                final_obs[row] = obs
            if info:
                final_info = self._add_info(final_info, info, row)
        return {
            "final_obs": final_obs,
            "_final_obs": mask,
            "final_info": final_info,
            "_final_info": mask.copy(),
        }

    def _observations(self) -> Tree:
        return as_batch(self._arrays.obs, copy=self.copy)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed; make a new one")
        if self._pool is not None and not self._pool.is_own():
            raise WorkerError(
                "this process is a forked copy of the one that made the env, and workers answer "
                "only to their own parent; make an env in this process"
            )

    def __reduce__(self) -> NoReturn:
        """Refuse: two copies would share running envs."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make a new one")

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"{name} was called while a {self._pending} is pending; call "
                f"{self._pending}_wait first",
                self._pending,
            )


def picked(items: Sequence[Item], indices: Sequence[int]) -> list[Item]:
    return [items[index] for index in indices]


def _checked_mask(mask: object, n_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {mask!r}")
    if mask.shape != (n_envs,) or not mask.any():
        raise ValueError(
            f"options['reset_mask'] must have shape ({n_envs},) and at least one True, got {mask}"
        )
    return mask
