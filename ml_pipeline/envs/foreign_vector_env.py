"""ForeignVectorEnv: a Gymnasium vector env of any library, with the ends of episodes we expect.

Gymnasium's vector envs start a new episode in one of three ways, their autoreset mode:

- SAME_STEP: the step that ends an episode returns the first observation of the next one.
- DISABLED: we reset the envs that have ended, with ``options={"reset_mask": mask}``.
- NEXT_STEP: the next step resets the env and ignores its action. That step is not a transition.

The first two look alike from outside, and so does NEXT_STEP if we can reset single envs before
that step. Otherwise ``has_reset_rows`` is true. Workers import this module: keep torch out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyVectorEnv, Info
from ml_pipeline.errors import BrokenEnvError, UserError, first_line, place_of

Mask = NDArray[np.bool_]

NO_SNAPSHOT = (
    "a vector env of another library runs as it is, so its episodes cannot be saved and its dead "
    "envs are not restarted"
)


class ForeignVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """The env's own batch, as arrays; ``infos`` hold the true final observations.

    An error of the env is raised as a ``BrokenEnvError`` of one line.
    """

    def __init__(self, env: AnyVectorEnv, name: str, n_envs: int | None = None) -> None:
        """``name`` is for errors; ``n_envs``: what was asked for, None: any number."""
        self.name = name
        self.env = env
        self.num_envs = env.num_envs
        if n_envs is not None and env.num_envs != n_envs:
            raise UserError(
                f"{name} has num_envs={env.num_envs}, but {n_envs} were asked for; use the "
                "argument num_envs when you make it"
            )
        for space in ("single_observation_space", "single_action_space", "action_space"):
            if not isinstance(getattr(env, space, None), spaces.Space):
                raise UserError(f"{name}: {type(env).__name__} has no {space}; set it to a space")
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.spec = env.spec
        self.render_mode = env.render_mode
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise UserError(
                f"{name}: metadata['autoreset_mode'] is {mode!r}; set it to an AutoresetMode of "
                "gymnasium.vector, so that the first step of an episode is known"
            )
        self.is_reset_by_us = mode is AutoresetMode.DISABLED or _resets_single_envs(env, mode)
        # A step of an env that has ended only resets it.
        self.has_reset_rows = mode is AutoresetMode.NEXT_STEP and not self.is_reset_by_us
        shown = AutoresetMode.NEXT_STEP if self.has_reset_rows else AutoresetMode.SAME_STEP
        self.metadata = {**env.metadata, "autoreset_mode": shown}
        self._action: Any = None
        self.tensor_device: Any = None  # of its observations after a reset; None: arrays

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, dict[str, Any]]:
        with self._errors("reset"):
            obs, infos = self.env.reset(seed=seed, options=options)
        self.tensor_device = next(_leaves(obs)).device if _is_tensor(obs) else None
        return self._checked(obs), infos

    def reset_tensors(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        """Observations and infos as the env returns them."""
        with self._errors("reset"):
            obs, infos = self.env.reset(seed=seed, options=options)
        return obs, infos

    def step_tensors(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """A step as the env returns it; envs that have ended are not reset."""
        with self._errors("step"):
            obs, reward, terminated, truncated, infos = self.env.step(actions)
        return obs, reward, terminated, truncated, infos

    def step_async(self, actions: Any) -> None:
        self._action = (
            actions if self.tensor_device is None else _as_tensors(actions, self.tensor_device)
        )
        if isinstance(self.env, AsyncVectorEnv):
            with self._errors("step"):
                self.env.step_async(actions)

    def step_wait(self) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        with self._errors("step"):
            if isinstance(self.env, AsyncVectorEnv):
                returned: Any = self.env.step_wait()
            else:
                returned = self.env.step(self._action)
            obs, reward, terminated, truncated, infos = returned
        obs = self._checked(obs)
        reward = self._column(reward, "rewards", np.float64)
        terminated = self._column(terminated, "terminations", np.bool_)
        truncated = self._column(truncated, "truncations", np.bool_)
        done = terminated | truncated
        if np.count_nonzero(done):
            if self.is_reset_by_us:
                obs, infos = self._restarted(obs, infos, done)
            elif self.has_reset_rows:
                infos = _without_masks(self._with_finals(obs, infos, done), done)
            else:
                infos = self._with_given_finals(infos, truncated & ~terminated)
        return obs, reward, terminated, truncated, infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    def _restarted(self, obs: Any, infos: Info, done: Mask) -> tuple[Any, dict[str, Any]]:
        """Reset the envs that have ended."""
        infos = self._with_finals(obs, infos, done)
        before = deepcopy(obs)  # the env may use its arrays again
        with self._errors("reset"):
            obs, new = self.env.reset(options={"reset_mask": done.copy()})
        obs = self._checked(obs)
        if not _equal(before, obs, ~done):
            others = np.flatnonzero(~done)
            index = next(i for i in others if not _equal(before, obs, np.array([i])))
            raise UserError(
                f"{self.name}: reset(options={{'reset_mask': mask}}) changed env {index}, which "
                "had not ended; make it reset only the envs of the mask, or use another autoreset "
                "mode"
            )
        return obs, _with_rows(infos, new, done)

    def _with_finals(self, obs: Any, infos: Info, done: Mask) -> dict[str, Any]:
        """``infos`` with the observations and infos of episodes that have just ended."""
        final_obs = np.full(self.num_envs, None, dtype=object)
        for index, row in enumerate(self._rows(obs)):
            if done[index]:
                final_obs[index] = deepcopy(row)
        finals = {"final_obs": final_obs, "final_info": dict(infos)}
        return {**infos, **finals, "_final_obs": done, "_final_info": done}

    def _with_given_finals(self, infos: Info, cut: Mask) -> dict[str, Any]:
        """``infos`` with one final observation per row; an env may return them as a batch."""
        if "final_obs" not in infos:
            if cut.any():
                raise UserError(
                    f"{self.name}: env {int(cut.argmax())} was truncated, but infos have no "
                    "final_obs, which autoreset_mode=SAME_STEP requires"
                )
            return infos
        given = infos["final_obs"]
        if isinstance(given, np.ndarray) and given.dtype == object:
            return infos
        final_obs = np.full(self.num_envs, None, dtype=object)
        for index, row in enumerate(self._rows(_as_arrays(given))):
            final_obs[index] = row
        return {**infos, "final_obs": final_obs}

    def _rows(self, obs: Any) -> Iterator[Any]:
        """The observation of each env."""
        return iter(iterate(self.observation_space, obs))

    def _checked(self, obs: Any) -> Any:
        """``obs`` as arrays, if each has a row per env."""
        obs = _as_arrays(obs)
        for leaf in _leaves(obs):
            if not isinstance(leaf, tuple) and np.shape(leaf)[:1] != (self.num_envs,):
                raise UserError(
                    f"{self.name}: observations have shape {np.shape(leaf)}; the first number "
                    f"must be num_envs, {self.num_envs}"
                )
        return obs

    def _column(self, values: Any, what: str, dtype: type) -> NDArray[Any]:
        column: NDArray[Any] = np.asarray(_as_arrays(values)).astype(dtype)  # a copy
        if column.shape != (self.num_envs,):
            raise UserError(
                f"{self.name}: {what} have shape {column.shape}, not ({self.num_envs},)"
            )
        return column

    @contextmanager
    def _errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # envs may raise anything
            text = f": {first_line(error, n_lines=5)}" if str(error).strip() else ""
            what = f"{type(error).__name__}{text}{place_of(error)}"
            raise BrokenEnvError(f"{self.name} raised in {method}: {what}") from error

    def render(self) -> Any:
        return self.env.render()

    def close(self, **kwargs: Any) -> None:
        if not self.closed:
            self.env.close(**kwargs)
            self.closed = True


class OneEnv(gym.Env[Any, Any]):
    """A vector env with one env, as a ``gymnasium.Env``: for trials, evaluation and videos.

    After an end it has already been reset. A reset without a seed returns what that gave, because
    a second one would skip an episode, or the rest of a game whose episode was one life.
    """

    def __init__(self, env: ForeignVectorEnv) -> None:
        self.env = env
        self.metadata = env.metadata
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.spec = env.spec
        self.render_mode = env.render_mode
        # See ``counts_episodes``.
        self.counts_own_episodes = getattr(env.env.unwrapped, "counts_own_episodes", False)
        self._next: tuple[Any, Info] | None = None  # what its own reset returned

    @property
    def has_reset_rows(self) -> bool:
        return self.env.has_reset_rows

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        if seed is None and not options and self._next is not None:
            following, self._next = self._next, None
            return following
        obs, infos = self.env.reset(seed=seed, options=options)
        self._next = None
        return self._row(obs), _row_of(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        space = self.action_space
        actions = concatenate(space, [action], create_empty_array(space, 1))  # type: ignore[arg-type]
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        row, info = self._row(obs), _row_of(infos)
        if terminated[0] or truncated[0]:
            self._next = None if self.has_reset_rows else (row, info)
            row = infos["final_obs"][0] if "final_obs" in infos else row
            info = _row_of(infos.get("final_info", {}))
        return row, float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def _row(self, obs: Any) -> Any:
        return deepcopy(next(iter(iterate(self.env.observation_space, obs))))

    def render(self) -> Any:
        frames = self.env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self.env.close()


def _resets_single_envs(env: AnyVectorEnv, mode: AutoresetMode) -> bool:
    """Whether a reset by mask is known to replace the reset of the next step.

    It does in Gymnasium's own two classes. A wrapper around them might count it twice, and
    ``AsyncVectorEnv`` without shared memory resets again.
    """
    if mode is not AutoresetMode.NEXT_STEP:
        return False
    return type(env) is SyncVectorEnv or (type(env) is AsyncVectorEnv and env.shared_memory)


def _as_arrays(value: Any) -> Any:
    """Tensors as arrays, in dicts and tuples too."""
    if isinstance(value, np.ndarray):  # first, because it is common and must be fast
        return value
    if isinstance(value, Mapping):
        return {key: _as_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_arrays(part) for part in value)
    if _is_tensor(value):
        return value.detach().cpu().numpy()
    return np.asarray(value) if hasattr(value, "__array__") else value


def _as_tensors(value: Any, device: Any) -> Any:
    """Arrays as tensors, in dicts and tuples too."""
    if isinstance(value, Mapping):
        return {key: _as_tensors(part, device) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_tensors(part, device) for part in value)
    # The env has imported torch; a worker without such an env must not.
    return sys.modules["torch"].as_tensor(value, device=device)


def _is_tensor(obs: Any) -> bool:
    """Whether an observation, or its first part, is a tensor; without an import of torch."""
    return type(next(_leaves(obs))).__module__ == "torch"


def _leaves(obs: Any) -> Iterator[Any]:
    if isinstance(obs, Mapping):
        for part in obs.values():
            yield from _leaves(part)
    elif isinstance(obs, tuple) and obs and all(hasattr(part, "__len__") for part in obs):
        for part in obs:
            yield from _leaves(part)
    else:
        yield obs


def _equal(before: Any, after: Any, rows: NDArray[Any]) -> bool:
    """Whether two batches of observations have the same ``rows``."""
    if isinstance(before, Mapping):
        return all(_equal(before[key], after[key], rows) for key in before)
    if isinstance(before, tuple):
        return all(_equal(*parts, rows) for parts in zip(before, after, strict=True))
    ours, theirs = before[rows], after[rows]
    return np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")


def _with_rows(infos: Info, new: Info, rows: Mask) -> dict[str, Any]:
    """Infos of Gymnasium's form, where ``rows`` are those of ``new``."""
    merged = dict(infos)
    for key in infos:
        if f"_{key}" in infos and not key.startswith(("final_", "_")):
            merged[f"_{key}"] = infos[f"_{key}"] & ~rows  # ``new`` has what these rows have
    for key, value in new.items():
        if key.startswith("_"):
            merged[key] = merged.get(key, np.zeros_like(rows)) | (value & rows)
        elif isinstance(value, Mapping):
            merged[key] = _with_rows(infos.get(key, {}), dict(value), rows)
        elif key in infos and isinstance(value, np.ndarray):
            where = rows.reshape(-1, *[1] * (value.ndim - 1))
            merged[key] = np.where(where, value, infos[key])
        else:
            merged[key] = value
    return merged


def _without_masks(infos: dict[str, Any], done: Mask) -> dict[str, Any]:
    """Allow envs every action in the step that resets them, because it is ignored."""
    mask = infos.get("action_mask")
    if isinstance(mask, np.ndarray) and mask.dtype != object:
        mask = mask.copy()
        mask[done] = 1
        has_mask = infos.get("_action_mask", np.ones_like(done)) | done
        return {**infos, "action_mask": mask, "_action_mask": has_mask}
    return infos


def _row_of(infos: Info) -> Info:
    """The info of env 0."""
    info: Info = {}
    for key, value in infos.items():
        has_it = infos.get(f"_{key}", (True,))
        if key.startswith(("_", "final_")) or not has_it[0]:
            continue
        if isinstance(value, Mapping):
            info[key] = _row_of(dict(value))
        elif isinstance(value, (np.ndarray, list, tuple)) and len(value) == 1:
            info[key] = value[0]
    return info
