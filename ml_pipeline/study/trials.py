"""A worker of a study: begins a trial or takes up a dead one, trains it, tells how it ended.

Whatever is known of a trial is in the journal or in its run folder before the next step is taken;
so a worker can be killed at any point, and the one that takes up the trial goes on from there.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import optuna
from omegaconf import DictConfig
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.build import RunResult
from ml_pipeline.build import run as run_once
from ml_pipeline.callbacks.pruning import METRIC, Pruning
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.door.compose import checked_config, compose_config, stored_config
from ml_pipeline.door.load import load_agent
from ml_pipeline.door.plan import RUN_ROOT
from ml_pipeline.envs.factory import close_env
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback
from ml_pipeline.runs.checkpoint import LATEST, checkpoint_path, load_checkpoint
from ml_pipeline.runs.console import say
from ml_pipeline.runs.env_snapshots import UntrustedSnapshotError
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import stream_seed
from ml_pipeline.signals import Interrupted
from ml_pipeline.study.folder import (
    HOST,
    Claim,
    StudyFolder,
    StudySettings,
    finished,
    running,
    why_hopeless,
)
from ml_pipeline.study.space import distributions, hydra_explained, one_line, param_overrides
from ml_pipeline.sweeps import end_with_parent

_LOOK_SECONDS = 0.5
_MOST_DEATHS = 5  # of the process of one trial, not counting stops in order


class Taken(NamedTuple):
    """A trial to train, and the right to do so."""

    trial: FrozenTrial
    claim: Claim


def work(name: str, *, first: int, parent: int) -> None:
    """Train trials until the study has as many as it wants.

    ``first`` is the number of the first trial that is new since the study was started, ``parent``
    the process that started it, with which this one ends.
    """
    if os.getppid() != parent:
        return  # it is gone already
    end_with_parent()
    _stop_by_exception()
    folder = StudyFolder.open(name)
    study = folder.study()
    while True:
        settings = folder.read()  # the goal may have been raised
        with folder.alone():
            trials = study.get_trials(deepcopy=False)
            if len(finished(trials)) >= settings.n_trials or why_hopeless(trials, first):
                return
            taken = _take(folder, study, settings, trials)
        if taken is None:
            time.sleep(_LOOK_SECONDS)  # the last trials run elsewhere, and may be left to us
            continue
        try:
            _run(study, settings, taken.trial)
        finally:
            taken.claim.release()


def _stop_by_exception() -> None:
    """Between two trainings, too, a stop signal ends this process in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, stop)


def _take(
    folder: StudyFolder, study: optuna.Study, settings: StudySettings, trials: list[FrozenTrial]
) -> Taken | None:
    """A dead trial, or a new one, or None where the rest is being trained; called ``alone``."""
    for trial in running(trials):
        claim = Claim.of(folder, trial)
        if claim is not None:
            claim.keep_beating()
            _note_take(study, trial)
            return Taken(_latest(study, trial), claim)
    if len(trials) >= settings.n_trials:
        return None
    trial = _new_trial(study, settings, trials)
    claim = Claim.of(folder, trial, new=True)
    if claim is None:
        raise RuntimeError(f"trial {trial.number} is new, and held by another process")
    claim.keep_beating()
    return Taken(trial, claim)


def _note_take(study: optuna.Study, trial: FrozenTrial) -> None:
    attrs = trial.user_attrs
    # Without a run folder it was stopped, or killed, before it had begun.
    in_order = attrs.get("stopped") or "run_dir" not in attrs
    deaths = 0 if in_order else attrs.get("deaths", 0) + 1
    news = {"host": HOST, "pid": os.getpid(), "stopped": False, "deaths": deaths}
    for key, value in news.items():
        _note(study, trial, key, value)


def _note(study: optuna.Study, trial: FrozenTrial, key: str, value: Any) -> None:
    study._storage.set_trial_user_attr(trial._trial_id, key, value)


def _latest(study: optuna.Study, trial: FrozenTrial) -> FrozenTrial:
    return study.get_trials(deepcopy=False)[trial.number]


def _new_trial(
    study: optuna.Study, settings: StudySettings, trials: list[FrozenTrial]
) -> FrozenTrial:
    """The next trial: drawn beside the journal and added to it as a whole.

    What is drawn depends on the study's seed, the trial's number and the trials before it.
    """
    number = len(trials)
    space = distributions(settings.space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 4 calls both options experimental
        sampler = TPESampler(
            seed=stream_seed(settings.seed, f"sampler of trial {number}"),
            multivariate=True,
            constant_liar=True,  # trials that run elsewhere are not drawn again
        )
    beside = optuna.create_study(direction="maximize", sampler=sampler)
    beside.add_trials(trials)
    token = secrets.token_hex(8)
    study.add_trial(
        create_trial(
            state=TrialState.RUNNING,
            params=beside.ask(space).params,
            distributions=space,
            user_attrs={
                "host": HOST,
                "pid": os.getpid(),
                "token": token,
                "seed": stream_seed(settings.seed, f"trial {number}"),
            },
        )
    )
    return next(
        trial
        for trial in reversed(study.get_trials(deepcopy=False))
        if trial.user_attrs.get("token") == token
    )


def trial_overrides(settings: StudySettings, trial: FrozenTrial) -> list[str]:
    """What ``train_ppo.py`` would be called with."""
    return [
        *settings.overrides,
        *param_overrides(settings.space, trial.params),
        f"seed={trial.user_attrs['seed']}",
        f"objective={settings.objective}",
    ]


def _run(study: optuna.Study, settings: StudySettings, trial: FrozenTrial) -> None:
    """Train a trial, or what is left of it, and tell the study."""
    say(f"trial {trial.number}: {trial.params}")
    try:
        if trial.user_attrs.get("deaths", 0) >= _MOST_DEATHS:
            raise UserError(f"its process has died {_MOST_DEATHS} times")
        value = _trained_value(study, settings, trial)
        if not math.isnan(value):
            study.tell(trial.number, value)
        elif _latest(study, trial).user_attrs.get("pruned"):
            study.tell(trial.number, state=TrialState.PRUNED)
        else:
            raise UserError(f"objective={settings.objective} was never measured")
    except KeyboardInterrupt:
        _note(study, trial, "stopped", True)
        raise
    except Exception as error:  # of an env, a network, a disk: the other trials go on
        if not isinstance(error, UserError):
            traceback.print_exc()
        reason = one_line(error)
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}"
        _note(study, trial, "error", reason)
        study.tell(trial.number, state=TrialState.FAIL)
    say(f"trial {trial.number}: {_latest(study, trial).state.name.lower()}")


def _trained_value(study: optuna.Study, settings: StudySettings, trial: FrozenTrial) -> float:
    """The objective of the trial's run, which is trained as far as it is not; nan if pruned."""
    overrides = trial_overrides(settings, trial)
    with hydra_explained():
        cfg = compose_config(overrides)
    config = checked_config(cfg)
    run = _run_folder(study, trial, config)
    if trial.user_attrs.get("pruned"):
        return math.nan
    if _has_checkpoint(run) and _is_trained(run):
        value = recorded_value(run, settings.objective)
    else:
        callbacks = _callbacks(study, trial, config)
        value = _train(run, cfg, overrides, study.study_name, callbacks).objective
    _note(study, trial, "seconds", run.read_summary().get("seconds"))
    return math.nan if _latest(study, trial).user_attrs.get("pruned") else value


def _train(
    run: RunFolder,
    cfg: DictConfig,
    overrides: list[str],
    study_name: str,
    callbacks: Mapping[str, Callback],
) -> RunResult:
    """Go on from the run's checkpoint; from the start, in the same folder, where it has none."""
    if _has_checkpoint(run):
        resume = [f"resume={run.path}"]
        try:
            return run_once(compose_config(resume), resume, sweep=study_name, callbacks=callbacks)
        except UntrustedSnapshotError:
            say(f"{run.path} was begun by someone with another key: trained anew")
    return run_once(cfg, overrides, sweep=study_name, callbacks=callbacks, folder=run)


def _has_checkpoint(run: RunFolder) -> bool:
    return run.config.is_file() and checkpoint_path(run, LATEST).is_file()


def _run_folder(study: optuna.Study, trial: FrozenTrial, config: TrainConfig) -> RunFolder:
    """Known to the journal before it is on the disk."""
    path = trial.user_attrs.get("run_dir")
    if path is not None:
        return RunFolder(Path(path))
    run = RunFolder.unused(RUN_ROOT, config.env.name)
    _note(study, trial, "run_dir", str(run.path))
    return run


def _callbacks(study: optuna.Study, trial: FrozenTrial, config: TrainConfig) -> dict[str, Pruning]:
    evaluation = config.callbacks.get("evaluation") or {}
    every_steps = evaluation.get("eval_every_steps")
    if every_steps is None:  # no evaluation, or one of the user's own
        return {}
    reported = set(trial.intermediate_values)
    pruning = Pruning(Trial(study, trial._trial_id), every_steps=every_steps, reported=reported)
    return {"pruning": pruning}


def _is_trained(run: RunFolder) -> bool:
    """Whether nothing is left to train, though the study was not told."""
    if run.read_summary().get("status") == "finished":
        return True
    config = checked_config(stored_config(run))
    return int(load_checkpoint(run, LATEST)["env_steps"]) >= config.wanted_steps


def recorded_value(run: RunFolder, objective: str) -> float:
    """The objective as the run left it; a last evaluation that was cut short is made up for."""
    rows = read_metrics(run.metrics)
    values = [row[objective] for row in rows if row.get(objective)]
    config = checked_config(stored_config(run))
    is_cut_short = objective == METRIC and not (rows and rows[-1].get(METRIC))
    if not is_cut_short or "evaluation" not in config.callbacks:
        return float(values[-1]) if values else math.nan
    trained = load_agent(run.path, LATEST)
    try:
        result = evaluate(
            trained.agent,
            trained.env,
            n_episodes=int(config.callbacks["evaluation"]["n_episodes"]),
            seed=stream_seed(config.seed, "evaluation"),
            deterministic=True,
        )
    finally:
        close_env(trained.env)
    return result.mean
