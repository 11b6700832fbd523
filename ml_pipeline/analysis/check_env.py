"""check_env: everything that can be found out about an env without training in it."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import NamedTuple

from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check

from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.factory import EnvFactory, close_env
from ml_pipeline.envs.kinds import MakeEnv
from ml_pipeline.envs.trial import in_worker, try_env
from ml_pipeline.envs.workers.pool import call_in_worker
from ml_pipeline.errors import UserError, first_line, type_and_line
from ml_pipeline.policy.box_scale import unsuitable_bounds
from ml_pipeline.policy.space_data import named_parts

# Gymnasium recommends these, but they make no difference to training.
_MATTERS_OF_TASTE = ("symmetric and normalized", "Box observation space", "not having been made")


class Findings(NamedTuple):
    """Lines to print; nothing can be trained in an env with faults."""

    facts: list[str]
    remarks: list[str]
    faults: list[str]


def check_env(
    make_env: EnvFactory, name: str, settings: VecEnvConfig, *, mask_key: str, seconds: float
) -> Findings:
    """Try the env in a worker, under the deadline of ``settings``; then Gymnasium's own checks.

    A vector env may have processes of its own, which a worker cannot start: it is tried here.
    """
    try:
        play = partial(
            try_env, make_env, name, mask_key=mask_key, seconds=seconds, most_steps=10_000
        )
        trial = play() if make_env.is_vector else in_worker(play, name, settings)
    except UserError as error:
        return Findings([], [], [str(error)])
    facts = [
        f"observation space: {trial.observation_space}",
        f"action space:      {trial.action_space}",
        f"played:            {trial.n_steps:,} steps, {1 / trial.step_seconds:,.0f} per second",
    ]
    remarks = list(trial.remarks)
    if not trial.has_ended and not trial.has_time_limit:
        by_wrapper = (
            "+env.wrappers.limit._target_=gymnasium.wrappers.TimeLimit "
            "+env.wrappers.limit.max_episode_steps=1000"
        )
        limit = "+env.kwargs.max_episode_steps=1000" if make_env.is_tensor_env else by_wrapper
        remarks.append(
            f"no episode ended within {trial.n_steps:,} steps; if it never ends, give it a limit: "
            f"{limit}"
        )
    for name, part in named_parts(trial.action_space, "actions").items():
        bounds = unsuitable_bounds(part) if isinstance(part, spaces.Box) else None
        if bounds is not None:
            remarks.append(
                f"{name} go from {bounds}, but agent.box_policy=gaussian, a default, suits "
                "bounds near 1: use agent.box_policy=squashed, or rescale the actions"
            )
    if trial.no_snapshot is not None:
        remarks.append(f"a resumed run starts new episodes: {trial.no_snapshot}")
    if make_env.is_vector:
        return Findings(facts, remarks, [])
    remarks += call_in_worker(
        partial(_gymnasium_remarks, make_env),
        start_method=settings.start_method or "spawn",  # type: ignore[arg-type]  # VecEnvConfig
        seconds=settings.step_timeout_seconds,
    )
    return Findings(facts, remarks, [])


def _gymnasium_remarks(make_env: MakeEnv) -> list[str]:
    """The warnings and the first error of Gymnasium's checker, which is stricter than training."""
    env = make_env()
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gymnasium_check(env.unwrapped, skip_render_check=True)
        except Exception as error:  # assertions, and anything that the env raises
            errors.append(type_and_line(error))
        finally:
            close_env(env)
    texts = [first_line(each.message) for each in caught]  # type: ignore[arg-type]
    plain = [re.sub(r"\x1b\[\d+m|WARN: ", "", text) for text in texts]
    kept = [each for each in plain if not any(taste in each for taste in _MATTERS_OF_TASTE)]
    return [f"Gymnasium's check_env: {each}" for each in dict.fromkeys([*kept, *errors])]
