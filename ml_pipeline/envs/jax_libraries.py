"""Tasks of libraries in JAX: gymnax, Craftax, Brax, MuJoCo Playground, Jumanji and pgx.

Each class says how its library starts an episode and takes a step. ``task_id`` is the library's own
name of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from ml_pipeline.envs.jax_env import Array, JaxVectorEnv, State
from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.extras import import_extra

_NO_LIMIT = np.iinfo(np.int32).max


class Gymnax(JaxVectorEnv):
    """A task of gymnax; ``params`` change its parameters, such as max_steps_in_episode."""

    reset_share = 1.0  # its resets are cheap

    def __init__(self, num_envs: int, *, task_id: str, params: Any = None, **settings: Any) -> None:
        gymnax = import_extra("gymnax", needed_by=f"task_id={task_id}")
        _check_task_id("gymnax", task_id, gymnax.registered_envs)
        self._env, defaults = gymnax.make(task_id)
        self._params = _with_params(defaults, params or {})
        self.single_action_space = _space(self._env.action_space(self._params))
        super().__init__(num_envs, **settings)

    def begin(self, key: Array) -> tuple[State, Any]:
        obs, state = self._env.reset_env(key, self._params)
        return state, obs

    def advance(self, key: Array, state: State, action: Array) -> tuple[Any, ...]:
        obs, state, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return state, obs, reward, terminated, self._env.is_truncated(state, self._params)


class Craftax(JaxVectorEnv):
    """A task of Craftax, such as Craftax-Classic-Symbolic-v1; ``params`` as for gymnax."""

    def __init__(self, num_envs: int, *, task_id: str, params: Any = None, **settings: Any) -> None:
        craftax = import_extra("craftax.craftax_env", needed_by=f"task_id={task_id}")
        kinds = ("Symbolic", "Pixels")
        known = [f"Craftax-{each}-v1" for each in (*kinds, *(f"Classic-{kind}" for kind in kinds))]
        _check_task_id("craftax", task_id, known)
        self._env = craftax.make_craftax_env_from_name(task_id, auto_reset=False)
        self._params = _with_params(self._env.default_params, params or {})
        self._unlimited = self._params.replace(max_timesteps=_NO_LIMIT)
        self.single_action_space = _space(self._env.action_space(self._params))
        super().__init__(num_envs, **settings)

    def begin(self, key: Array) -> tuple[State, Any]:
        obs, state = self._env.reset_env(key, self._params)
        return state, obs

    def advance(self, key: Array, state: State, action: Array) -> tuple[Any, ...]:
        obs, state, reward, done, _ = self._env.step_env(key, state, action, self._params)
        terminated = self._env.is_terminal(state, self._unlimited)
        return state, obs, reward, terminated, done & ~terminated


class _Physics(JaxVectorEnv):
    """What Brax and MuJoCo Playground have in common; ``self._env`` is an env of theirs."""

    _env: Any

    def begin(self, key: Array) -> tuple[State, Any]:
        state = self._env.reset(key)
        return state, self._seen(state)

    def advance(self, key: Array, state: State, action: Array) -> tuple[Any, ...]:
        state = self._env.step(state, action)
        return state, self._seen(state), state.reward, state.done, jnp.zeros((), bool)

    def _seen(self, state: State) -> Any:
        # Others of a dict are for critics alone.
        return state.obs["state"] if isinstance(state.obs, Mapping) else state.obs


class Brax(_Physics):
    """A task of Brax, such as ant; other arguments are those of its class, such as backend."""

    max_episode_steps = 1000

    def __init__(
        self,
        num_envs: int,
        *,
        task_id: str,
        device: Any = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
        **options: Any,
    ) -> None:
        envs = import_extra("brax.envs", needed_by=f"task_id={task_id}")
        _check_task_id("brax", task_id, list(envs._envs))
        self._env = envs.get_environment(task_id, **options)
        self.single_action_space = spaces.Box(-1.0, 1.0, (self._env.action_size,), np.float32)
        super().__init__(num_envs, device=device, seed=seed, max_episode_steps=max_episode_steps)


class Playground(_Physics):
    """A task of MuJoCo Playground, such as CheetahRun; ``config`` changes its config."""

    def __init__(self, num_envs: int, *, task_id: str, config: Any = None, **settings: Any) -> None:
        registry = import_extra("mujoco_playground", needed_by=f"task_id={task_id}").registry
        _check_task_id("mujoco_playground", task_id, list(registry.ALL_ENVS))
        self._env = registry.load(task_id, config_overrides=dict(config or {}))
        self.max_episode_steps = int(registry.get_default_config(task_id).episode_length)
        self.single_action_space = spaces.Box(-1.0, 1.0, (self._env.action_size,), np.float32)
        super().__init__(num_envs, **settings)


class Jumanji(JaxVectorEnv):
    """A task of Jumanji with one agent, such as Snake-v1; action masks are not used."""

    def __init__(self, num_envs: int, *, task_id: str, **settings: Any) -> None:
        jumanji = import_extra("jumanji", needed_by=f"task_id={task_id}")
        _check_task_id("jumanji", task_id, jumanji.registered_environments())
        self._env = jumanji.make(task_id)
        self.single_action_space = _space_of_spec(task_id, self._env.action_spec)
        super().__init__(num_envs, **settings)

    def begin(self, key: Array) -> tuple[State, Any]:
        state, step = self._env.reset(key)
        return state, step.observation

    def advance(self, key: Array, state: State, action: Array) -> tuple[Any, ...]:
        state, step = self._env.step(state, action)
        is_over, has_future = step.last(), step.discount != 0
        return state, step.observation, step.reward, is_over & ~has_future, is_over & has_future


class Pgx(JaxVectorEnv):
    """A task of pgx with one player, such as minatar-breakout; action masks are not used."""

    def __init__(self, num_envs: int, *, task_id: str, **settings: Any) -> None:
        pgx = import_extra("pgx", needed_by=f"task_id={task_id}")
        _check_task_id("pgx", task_id, list(pgx.available_envs()))
        self._env = pgx.make(task_id)
        if self._env.num_players != 1:
            raise ValueError(
                f"task_id={task_id} has {self._env.num_players} players; use one with one player, "
                "such as minatar-breakout"
            )
        self.single_action_space = spaces.Discrete(self._env.num_actions)
        super().__init__(num_envs, **settings)

    def begin(self, key: Array) -> tuple[State, Any]:
        state = self._env.init(key)
        return state, state.observation

    def advance(self, key: Array, state: State, action: Array) -> tuple[Any, ...]:
        state = self._env.step(state, action, key)
        return state, state.observation, state.rewards[0], state.terminated, state.truncated


def _check_task_id(library: str, task_id: str, known: Sequence[str]) -> None:
    if task_id not in known:
        near = get_close_matches(task_id, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"task_id={task_id}: {library} has no such task; {hint}")


def _with_params(defaults: Any, changes: Mapping[str, Any]) -> Any:
    for name in changes:
        if not hasattr(defaults, name):
            known = ", ".join(vars(defaults))
            raise ValueError(f"params.{name}: the task has no such parameter; it has {known}")
    return defaults.replace(**changes)


def _space(theirs: Any) -> AnySpace:
    """Gymnasium's space of the same kind as one of gymnax or Craftax."""
    if hasattr(theirs, "n"):
        return spaces.Discrete(int(theirs.n))
    return _box(theirs.low, theirs.high, theirs.shape)


def _space_of_spec(task_id: str, spec: Any) -> AnySpace:
    if hasattr(spec, "num_values"):
        n = np.asarray(spec.num_values)
        return spaces.MultiDiscrete(n) if n.ndim else spaces.Discrete(int(n))
    if hasattr(spec, "minimum"):
        return _box(spec.minimum, spec.maximum, spec.shape)
    raise ValueError(f"task_id={task_id}: its actions, {spec}, are neither discrete nor a box")


def _box(low: Any, high: Any, shape: tuple[int, ...]) -> spaces.Box:
    low, high = (np.broadcast_to(np.asarray(each, np.float32), shape) for each in (low, high))
    return spaces.Box(low, high, dtype=np.float32)
