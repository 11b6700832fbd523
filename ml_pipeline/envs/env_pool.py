"""EnvPool: envs of the library EnvPool, which steps them in C++ threads, as a vector env.

EnvPool itself starts a new episode in the step after an end and ignores its action. It can take
that step for single envs, so here it is their reset: ``ForeignVectorEnv`` asks for it at once, and
every other step is a transition. Its seeds are fixed when a pool is made; a reset with a seed makes
a new pool.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace, Info
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.extras import import_extra

_N_SEEDS = 2**31  # EnvPool's are of 32 bits
_OURS = {
    "batch_size": "all envs step together",
    "env_seed": "seed sets it",
    "env_type": "it is gymnasium",
    "gym_reset_return_info": "it is true",
    "max_num_players": "one player is supported",
    "seed": "the seed of the run sets it",
}
# Settings of envpool.make that no task lists.
_RENDERING = ("from_pixels", "render_camera_id", "render_env_id", "render_height", "render_width")
# Not numbers of an episode: what EnvPool needs itself, and what a step returns anyway.
_INTERNAL = {"env_id", "players", "elapsed_step", "reward", "terminated"}


class EnvPool(VectorEnv[Any, Any, NDArray[Any]]):
    """``num_envs`` envs of one task; ``settings`` are those of ``envpool.make`` for it.

    Atari games report whole games with unclipped rewards as ``infos["episode"]``, as
    ``RecordEpisodeStatistics`` does: an episode may be one life, and rewards may be clipped.
    """

    metadata = {  # noqa: RUF012 - as in Gymnasium
        "autoreset_mode": AutoresetMode.DISABLED,
        "render_modes": ["rgb_array"],
    }

    def __init__(
        self, num_envs: int, task_id: str, *, render_mode: str | None = None, **settings: Any
    ) -> None:
        """``num_threads`` is a setting too; by default it is the number of cores."""
        library = import_extra("envpool", needed_by=f"env.kwargs.task_id={task_id}")
        threads = min(num_envs, available_cores())
        self._settings = {"num_envs": num_envs, "num_threads": threads, **settings}
        if render_mode is not None:
            self._settings["render_mode"] = render_mode
        self._make, self._task_id = library.make_gymnasium, task_id
        spec = _spec_of(library, task_id, settings)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.spec = EnvSpec(task_id, max_episode_steps=spec.config.max_episode_steps)
        with _no_warnings():
            self.single_observation_space = _with_real_bounds(spec.gymnasium_observation_space)
            self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.counts_own_episodes = {"info:reward", "info:terminated"} <= set(spec._state_keys)
        self._no_action = np.zeros_like(self.action_space.sample())
        self._pool: Any = None
        self._obs: Any = None  # of all envs
        self._has_ended = np.zeros(num_envs, dtype=bool)
        self._return = np.zeros(num_envs)  # of the games so far

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of ``options["reset_mask"]``, which must have ended."""
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            return self._continue(np.flatnonzero(mask & self._has_ended).astype(np.int32))
        if seed is not None or self._pool is None:
            first = int(self.np_random.integers(_N_SEEDS)) if seed is None else seed
            seeds = [(first + index) % _N_SEEDS for index in range(self.num_envs)]
            self._pool = self._make(self._task_id, env_seed=seeds, **self._settings)
        self._return[:] = 0.0
        self._has_ended[:] = False
        with _no_warnings():
            self._obs, infos = self._pool.reset()
        return self._obs, self._infos(infos, np.ones(self.num_envs, dtype=bool))

    def _continue(self, envs: NDArray[np.int32]) -> tuple[Any, dict[str, Any]]:
        """Let envs that have ended go to their next episode, by the step that only resets them.

        EnvPool's own reset would end a game that has lives left.
        """
        ignored = self._no_action[: len(envs)]
        obs, _, _, _, infos = self._pool.step(ignored, envs)
        order = infos["env_id"]  # EnvPool may answer in another one
        self._obs = _with_rows(self._obs, order, obs)
        is_new = np.zeros(self.num_envs, dtype=bool)
        is_new[order] = True
        self._has_ended[order] = False
        rows = {
            name: _with_rows(np.zeros((self.num_envs, *value.shape[1:]), value.dtype), order, value)
            for name, value in infos.items()
            if isinstance(value, np.ndarray)
        }
        return self._obs, self._infos(rows, is_new)

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        self._obs, reward, terminated, truncated, given = self._pool.step(actions)
        self._has_ended = terminated | truncated
        infos = self._infos(given, np.ones(self.num_envs, dtype=bool))
        if self.counts_own_episodes:
            self._return += given["reward"]
            is_over = (given["terminated"] != 0) | truncated
            if is_over.any():
                episode = {"r": self._return.copy(), "l": given["elapsed_step"]}
                infos |= {"episode": episode, "_episode": is_over}
                self._return[is_over] = 0.0
        return self._obs, reward, terminated, truncated, infos

    def _infos(self, given: Mapping[str, Any], rows: NDArray[np.bool_]) -> dict[str, Any]:
        """The infos of these rows, in Gymnasium's form."""
        infos: dict[str, Any] = {}
        for name, value in given.items():
            if name not in _INTERNAL and isinstance(value, np.ndarray):
                ours = "action_mask" if name == "legal_action_mask" else name
                infos |= {ours: value, f"_{ours}": rows}
        return infos

    def render(self) -> tuple[Any, ...] | None:
        frames = self._pool.render(np.arange(self.num_envs))
        return None if frames is None else tuple(frames)

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None  # ends its threads


def _spec_of(library: Any, task_id: str, settings: Mapping[str, Any]) -> Any:
    """What EnvPool knows about a task; checks its name and settings."""
    if task_id not in library.list_all_envs():
        near = get_close_matches(task_id, library.list_all_envs(), n=3, cutoff=0.6)
        fix = f"did you mean {' or '.join(near)}?" if near else "see envpool.list_all_envs()"
        raise ValueError(f"env.kwargs.task_id={task_id} is not a task of EnvPool; {fix}")
    for name in settings:
        if name in _OURS:
            raise ValueError(f"env.kwargs.{name}: {_OURS[name]}; remove the key")
    try:
        known = library.make_spec(task_id).config
    except ImportError as error:  # a library of the system, which the message names
        raise ValueError(f"env.kwargs.task_id={task_id}: {error}") from error
    if known.max_num_players > 1:
        raise ValueError(
            f"env.kwargs.task_id={task_id}: this task has {known.max_num_players} players, which "
            "is not supported; use a PettingZoo game"
        )
    names = [*known._fields, *_RENDERING]
    for name, value in settings.items():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"{task_id} has {', '.join(names)}"
            raise ValueError(f"env.kwargs.{name} is unknown; {fix}")
        default = getattr(known, name, None)
        kinds = (int, float) if type(default) is float else type(default)
        if isinstance(default, (bool, int, float, str)) and not isinstance(value, kinds):
            raise ValueError(
                f"env.kwargs.{name}={value}: must be like its default, {default}; got a "
                f"{type(value).__name__}"
            )
    return library.make_spec(task_id, **settings)


def _with_real_bounds(space: AnySpace) -> AnySpace:
    """EnvPool writes the ends of the range of floats where there is no bound."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_real_bounds(part) for key, part in space.items()})
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        limits = np.finfo(space.dtype)
        is_open = (space.low <= limits.tiny) & (space.high >= limits.max)
        low = np.where(is_open, -np.inf, space.low).astype(space.dtype)
        high = np.where(is_open, np.inf, space.high).astype(space.dtype)
        return spaces.Box(low, high, dtype=space.dtype.type)
    return space


def _with_rows(batch: Any, rows: NDArray[Any], new: Any) -> Any:
    """A copy of ``batch``, an array or a dict of batches, with other ``rows``."""
    if isinstance(batch, Mapping):
        return {key: _with_rows(part, rows, new[key]) for key, part in batch.items()}
    batch = batch.copy()
    batch[rows] = new
    return batch


@contextmanager
def _no_warnings() -> Iterator[None]:
    """EnvPool makes spaces that Gymnasium warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
