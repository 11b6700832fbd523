"""Studies of envs that judge their runs: what selects a trial, and what may be deployed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ml_pipeline.config.train import TrainConfig
from ml_pipeline.envs.judged import JudgedEnv
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.study.folder import StudyError
from ml_pipeline.targets import import_dotted

Judge = Callable[[Path, int], dict[str, object]]  # (run folder, n_trials) -> facts; may refuse


def check_selection(config: TrainConfig) -> None:
    """Refuse a study whose evaluations must not select trials."""
    env = _judged_env(config)
    reason = None if env is None else env.why_not_select(config.evaluated_env.kwargs)
    if reason is not None:
        raise StudyError(reason)


def judged_facts(run: RunFolder, config: TrainConfig, *, n_trials: int) -> dict[str, object]:
    """What the env says about a run that shall be deployed; empty for other envs."""
    env = _judged_env(config)
    if env is None:
        return {}
    judge: Judge = import_dotted(env.judge, key="judge")
    return judge(run.path, n_trials)


def _judged_env(config: TrainConfig) -> JudgedEnv | None:
    """The class of the env of evaluations, if it judges runs."""
    target = config.evaluated_env.target
    kind = None if target is None else import_dotted(target, key="env.target")
    return kind if isinstance(kind, JudgedEnv) else None
