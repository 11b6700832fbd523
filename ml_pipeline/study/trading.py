"""Studies of trading envs: trials are selected, and deployed, by bars that none was trained on."""

from __future__ import annotations

from typing import Any

from ml_pipeline.config.train import TrainConfig
from ml_pipeline.runs.console import user_command
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.study.folder import StudyError
from ml_pipeline.targets import import_dotted

_VALIDATION = "validation"


def is_trading(config: TrainConfig) -> bool:
    """Whether the env of evaluations is a trading env, or a subclass of one."""
    target = config.evaluated_env.target
    if target is None:
        return False
    from ml_pipeline.envs.tasks.trading import Trading
    from ml_pipeline.envs.tensor_tasks.trading import TorchTrading

    kind = import_dotted(target, key="env.target")
    return isinstance(kind, type) and issubclass(kind, (Trading, TorchTrading))


def check_period(config: TrainConfig) -> None:
    """Refuse a study that would select trials by bars of the train or the test period."""
    if not is_trading(config):
        return
    period = config.evaluated_env.kwargs.get("period", "train")
    if period != _VALIDATION:
        raise StudyError(
            f"eval_env.kwargs.period={period}: a study selects trials by their evaluations, and "
            "the test period must stay unseen; add +eval_env.kwargs.period=validation"
        )


def judged_facts(run: RunFolder, config: TrainConfig, *, n_trials: int) -> dict[str, Any]:
    """What the judge says about a run that shall be deployed; refuses one without an edge.

    ``n_trials`` counts the trials that the run was selected from. Empty for other envs.
    """
    if not is_trading(config):
        return {}
    from ml_pipeline.door.judge import judge_run

    judged = judge_run(run.path, period=_VALIDATION, n_trials=n_trials)
    if not judged.claims_edge:
        raise StudyError(
            f"not deployed: {run.path} does not hold on the validation period: {judged.verdict}; "
            "the study is kept; to watch this policy on paper anyway: "
            f"{user_command('export')} {run.path}"
        )
    return {"sharpe": judged.sharpe, "verdict": judged.verdict, "n_trials": n_trials}
