"""check_phases: finds the mistakes of a curriculum before a run folder exists."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import partial

from ml_pipeline.assembly.agent import mask_key
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.callbacks.evaluation import PeriodicEvaluation
from ml_pipeline.config.curriculum import CurriculumConfig
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.envs.trial import in_worker, try_phases
from ml_pipeline.training.contracts import Callback

# The metrics that only a phase with episodes or evaluations has; see also rollout/info/NAME.
EPISODE_METRICS = (
    *("rollout/episode_return", "rollout/episode_return_mean_100"),
    *("rollout/episode_length", "rollout/episode_length_mean_100", "rollout/total_episodes"),
)
EVALUATION_METRICS = (
    *("eval/episode_return", "eval/episode_return_std"),
    *("eval/episode_length", "eval/n_cut_episodes"),
)
_OTHER_GROUPS = ("loss", "policy", "value", "replay", "time", "workers", "gpu", "opponents")


def check_phases(
    config: TrainConfig,
    curriculum: CurriculumConfig,
    callbacks: Sequence[Callback],
    *,
    env: EnvFactory | DeviceVectorEnv,
    opponents: Collection[str] | None,
) -> None:
    """Refuse settings that the envs do not accept, and metrics that nothing logs.

    ``opponents``: the scripted players of self-play; None without self-play.
    """
    for name, phase in curriculum.phases.items():
        if opponents is not None and "opponent" in phase.env:
            raise ConfigError(
                f"curriculum.phases.{name}.env.opponent={phase.env['opponent']}: with self-play "
                "the env has two players; name shares of the games instead, such as "
                f"curriculum.phases.{name}.opponents={{weak: 0.5}}"
            )
        for opponent in phase.opponents:
            _check_opponent(f"curriculum.phases.{name}.opponents.{opponent}", opponent, opponents)
    if isinstance(env, DeviceVectorEnv):
        _try_tensor_settings(curriculum, env)
        infos: dict[str, list[str] | None] = {name: [] for name in curriculum.phases}
    else:
        infos = _try_settings(config, curriculum, env)
    for name, phase in curriculum.phases.items():
        if phase.until.metric is not None:
            key = f"curriculum.phases.{name}.until.metric={phase.until.metric}"
            _check_metric(key, phase.until.metric, infos[name], callbacks)


def _check_opponent(key: str, name: str, known: Collection[str] | None) -> None:
    if known is None:
        raise ConfigError(
            f"{key}: the run has no opponents to choose from; add opponent=self_play, or set an "
            "attribute of the env"
        )
    if name not in known:
        raise ConfigError(f"{key}: this env has no such player, only {', '.join(known) or 'none'}")


def _try_settings(
    config: TrainConfig, curriculum: CurriculumConfig, make_env: EnvFactory
) -> dict[str, list[str] | None]:
    name = config.env.name
    phases = {phase: curriculum.settings_of(phase) for phase in curriculum.phases}
    play = partial(try_phases, make_env, name, phases=phases, mask_key=mask_key(config))
    return in_worker(play, name, config.vec_env) if config.vec_env.mode == "parallel" else play()


def _try_tensor_settings(curriculum: CurriculumConfig, env: DeviceVectorEnv) -> None:
    for phase in curriculum.phases:
        for name, value in curriculum.phases[phase].env.items():
            try:
                env.set_attr(name, value)
            except (ValueError, TypeError, RuntimeError) as error:
                key = f"curriculum.phases.{phase}.env.{name}={value}"
                raise ConfigError(f"{key}: {error}") from error


def _check_metric(
    key: str, metric: str, infos: list[str] | None, callbacks: Sequence[Callback]
) -> None:
    """``infos``: the numbers in the last info of an episode; None: not known."""
    group, _, name = metric.partition("/")
    evaluates = any(isinstance(each, PeriodicEvaluation) for each in callbacks)
    known = [*EPISODE_METRICS, *(EVALUATION_METRICS if evaluates else ())]
    known += [f"rollout/info/{each}" for each in infos or ()]
    if metric in known or (group in _OTHER_GROUPS and name):
        return
    if group == "eval" and not evaluates:
        raise ConfigError(f"{key}: the run has no evaluation; add callbacks.evaluation")
    if metric.startswith("eval/info/") or (metric.startswith("rollout/info/") and infos is None):
        return  # the run reports it if nothing logs it
    is_own = any(not type(each).__module__.startswith("ml_pipeline.") for each in callbacks)
    if is_own and name and group not in ("rollout", "eval"):
        return
    if infos is None:
        known.append(f"rollout/info/{metric.rpartition('/')[2]}")
    near = get_close_matches(metric, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    raise ConfigError(f"{key}: nothing logs this metric; {hint}")
