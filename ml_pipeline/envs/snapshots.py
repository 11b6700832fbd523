"""Snapshots: a running env as bytes, so that its episode can continue in another process.

A snapshot is a pickle of the whole env with its wrappers and random generators. An env that cannot
be pickled can return its state instead. A user's env has ``get_state()`` and ``set_state(state)``
for this; MuJoCo and the Arcade Learning Environment have their own functions. Some envs can be
pickled, but are unpickled as new envs (Gymnasium's ``EzPickle``). ``why_no_snapshot`` detects them.

Loading a pickle runs its code. Workers import this module: keep torch out of it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.utils import EzPickle

from ml_pipeline.envs.factory import allowed_action, close_env
from ml_pipeline.envs.kinds import AnyEnv, Info
from ml_pipeline.errors import type_and_line
from ml_pipeline.moved import moved
from ml_pipeline.records import StateDict

_BASE = "the env below all wrappers"  # its name in a pickle that leaves it out; a file format
_TRIAL_STEPS = 24


def take_snapshot(env: AnyEnv, obs: object) -> bytes:
    """The env between two steps, together with its last observation."""
    base = env.unwrapped
    state = _state_of(base)
    file = io.BytesIO()
    _Pickler(file, base if state is not None else None).dump((env, state, obs))
    return file.getvalue()


def restore_snapshot(env: AnyEnv, snapshot: bytes) -> tuple[AnyEnv, Any]:
    """The saved env and its observation; ``env`` must be a new one from the same factory."""
    base = env.unwrapped
    restored, state, obs = _Unpickler(io.BytesIO(snapshot), base).load()
    if state is None:
        close_env(env)  # the unpickled env replaces it
    else:
        _set_state(base, state)
    return restored, obs


def why_no_snapshot(
    env: AnyEnv,
    make_env: Callable[[], AnyEnv],
    *,
    mask_key: str = "action_mask",
) -> str | None:
    """Why an episode of ``env`` cannot continue in another process; None if it can.

    Plays a few steps in ``env``, restores a copy, and compares both for some more steps.
    """
    setter = getattr(type(env.unwrapped), "__setstate__", None)
    if setter is EzPickle.__setstate__ and _state_of(env.unwrapped) is None:
        return f"{type(env.unwrapped).__name__} is an EzPickle, which is unpickled as a new env"
    other: AnyEnv | None = None
    try:
        other = make_env()
        env.action_space.seed(0)
        obs, info = env.reset(seed=0)
        for _ in range(3):
            obs, info = _play(env, allowed_action(env, obs, info, mask_key))[1:3]
        other, _ = restore_snapshot(other, take_snapshot(env, obs))
        for _ in range(_TRIAL_STEPS):
            action = allowed_action(env, obs, info, mask_key)
            ours, theirs = _play(env, action), _play(other, action)
            if not (_equal(ours[0], theirs[0]) and _equal(ours[1], theirs[1])):
                return "a restored env behaves differently"
            obs, info = ours[1:]
    except Exception as error:  # envs and their pickles may raise anything
        return type_and_line(error)
    finally:
        if other is not None:
            close_env(other)
    return None


def _play(env: AnyEnv, action: object) -> tuple[Any, Any, Info]:
    """The result of a step, and the observation and info to continue with."""
    obs, reward, terminated, truncated, info = env.step(action)
    result = obs, reward, terminated, truncated
    if terminated or truncated:
        obs, info = env.reset()
    return result, obs, info


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (tuple, list)):
        same = len(ours) == len(theirs)
        return same and all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    # NaN equals NaN here; equal_nan fails for dtypes that are not numbers.
    return np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == theirs.dtype.kind == "f")


def _state_of(base: Any) -> StateDict | None:
    """The state that the env returns; None if the env must be pickled."""
    if callable(getattr(base, "get_state", None)) and callable(getattr(base, "set_state", None)):
        generator = getattr(base, "_np_random", None)
        rest = {"_np_random": generator, "_np_random_seed": getattr(base, "_np_random_seed", None)}
        return {"own": base.get_state(), "rest": rest}
    if type(getattr(base, "data", None)).__name__ == "MjData" and hasattr(base, "model"):
        return {"mujoco": base.data, "rest": _rest(base, ("data", "model", "mujoco_renderer"))}
    if hasattr(base, "clone_state") and hasattr(base, "restore_state"):
        return {"ale": base.clone_state(include_rng=True), "rest": _rest(base, ("ale",))}
    return None


def _set_state(base: Any, state: StateDict) -> None:
    if "own" in state:
        base.set_state(state["own"])
    elif "mujoco" in state:
        import mujoco

        mujoco.mj_copyData(base.data, base.model, state["mujoco"])
    else:
        base.restore_state(state["ale"])
    vars(base).update(state["rest"])


def _rest(base: AnyEnv, left_out: tuple[str, ...]) -> StateDict:
    """The attributes of an env except its simulator, if they can be pickled."""
    rest = {}
    for name, value in vars(base).items():
        if name not in (*left_out, "observation_space", "action_space", "spec"):
            try:
                cloudpickle.dumps(value)
            except Exception:  # may raise anything; the trial shows whether the value is needed
                continue
            rest[name] = value
    return rest


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out one object and writes a name in its place."""

    def __init__(self, file: io.BytesIO, left_out: object) -> None:
        super().__init__(file)
        self._left_out = left_out

    def persistent_id(self, item: object) -> str | None:
        return _BASE if self._left_out is not None and item is self._left_out else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, base: object) -> None:
        super().__init__(file)
        self._base = base

    def find_class(self, module_name: str, global_name: str) -> Any:
        path = moved(f"{module_name}.{global_name}").removesuffix(f".{global_name}")
        return super().find_class(path, global_name)

    def persistent_load(self, name: object) -> object:
        if name != _BASE:
            raise pickle.UnpicklingError(f"unknown reference {name!r}")
        return self._base
