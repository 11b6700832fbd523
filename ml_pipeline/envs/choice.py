"""choose_mode and choose_n_envs: resolve ``vec_env=auto`` and ``n_envs=auto``.

Both time the policy for a moment; the time of an env's step comes from its trial. A turn is one
step of a rollout: the policy acts for all envs, then all envs step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from ml_pipeline.envs.kinds import AnyVectorEnv
from ml_pipeline.envs.trial import EnvTrial
from ml_pipeline.envs.vec_env import WorkerStartError

Mode = Literal["serial", "parallel", "shared"]
Act = Callable[[Any, Any], Any]  # observations, infos -> actions; each for all envs

_SHARED_GAIN = 1.25  # shared gives up isolation, so it must be this much faster than parallel
_WORKER_GAIN = 1.1  # workers cost memory and time to start, so they must be this much faster
# A low estimate of the cost of a message to workers. It only decides whether to time them.
_EXCHANGE_SECONDS = 30e-6
_ENOUGH = 0.9  # n_envs=auto takes the smallest number with this share of the best throughput


def choose_mode(
    make: Callable[[Mode], AnyVectorEnv],
    trial: EnvTrial,
    act: Act,
    *,
    n_envs: int,
    n_slices: int,
) -> tuple[Mode, str]:
    """The fastest way to run ``n_envs`` of the tried envs in ``n_slices`` processes, and why.

    ``make`` returns the vector env of a mode, which is timed for a moment and closed. It is not
    called if workers could not be faster even with the cheapest messages.
    """
    if n_envs == 1:
        return "serial", "one env needs no worker"
    if n_slices == 1:
        return "serial", "one process leaves no core for a worker"
    step, acting = trial.step_seconds, _act_seconds(trial, act, n_envs)
    seconds: dict[Mode, float] = {"serial": n_envs * step + acting}
    at_best = -(-n_envs // n_slices) * step + acting + _EXCHANGE_SECONDS
    if seconds["serial"] < _WORKER_GAIN * at_best:
        turn, best = _in_ms(seconds["serial"]), _in_ms(at_best)
        return "serial", f"a turn takes {turn} here, at best {best} with workers"
    try:
        for mode in ("parallel", "shared"):
            seconds[mode] = _turn_seconds(make(mode), act)
    except WorkerStartError as error:
        return "serial", str(error)
    return _fastest(seconds)


def _fastest(seconds: dict[Mode, float]) -> tuple[Mode, str]:
    mode: Mode = "parallel"
    if seconds["parallel"] >= _SHARED_GAIN * seconds["shared"]:
        mode = "shared"
    if seconds["serial"] < _WORKER_GAIN * seconds[mode]:
        mode = "serial"
    turns = ", ".join(f"{each} {_in_ms(seconds[each])}" for each in seconds)
    return mode, f"a turn took: {turns}"


def choose_n_envs(
    trial: EnvTrial, act: Act, *, n_slices: int, allowed: Callable[[int], bool]
) -> tuple[int, str]:
    """The smallest number of envs with nearly the best throughput, up to 32 per process; and why.

    Tries those powers of two times ``n_slices`` that are ``allowed``; returns 8 if none is.
    """
    numbers = [n for n in (n_slices * 2**k for k in range(6)) if allowed(n)]
    if not numbers:
        return 8, "n_envs=auto: the run is too short to measure"
    step = trial.step_seconds
    rates = {}
    for n in numbers:
        work = min(n * step, -(-n // n_slices) * step + _EXCHANGE_SECONDS)
        rates[n] = n / (work + _act_seconds(trial, act, n))
    best = max(rates.values())
    n_envs = min(n for n in numbers if rates[n] >= _ENOUGH * best)
    reason = (
        f"n_envs=auto: expects about {rates[n_envs]:,.0f} env steps/s, "
        f"at most {best:,.0f} with up to {numbers[-1]} envs"
    )
    return n_envs, reason


def _act_seconds(trial: EnvTrial, act: Act, n_envs: int) -> float:
    space = trial.observation_space
    empty: Any = create_empty_array(space, n_envs)
    batch = concatenate(space, [trial.obs] * n_envs, empty)
    infos = {name: [value] * n_envs for name, value in trial.info.items()}
    return _median_seconds(lambda: act(batch, infos), 20)


def _turn_seconds(env: AnyVectorEnv, act: Act, *, seconds: float = 0.3) -> float:
    try:
        obs, infos = env.reset(seed=0)
        durations: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(durations) < 5 or time.perf_counter() < deadline:
            start = time.perf_counter()
            obs, _, _, _, infos = env.step(act(obs, infos))
            durations.append(time.perf_counter() - start)
        # The mean, because resets count; of the second half, because the first turns are slow.
        return float(np.mean(durations[len(durations) // 2 :]))
    finally:
        env.close()


def _median_seconds(work: Callable[[], object], n_times: int) -> float:
    durations: list[float] = []
    for _ in range(n_times):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return float(np.median(durations))


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
