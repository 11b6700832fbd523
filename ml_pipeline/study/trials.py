"""A worker of a study: begins a trial or continues a dead one, trains it and records the result.

Each step is recorded in the journal or the run folder before the next one begins. So a worker may
be killed at any point, and another worker continues its trial.
"""

from __future__ import annotations

import math
import os
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from filelock import FileLock
from omegaconf import DictConfig
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from ml_pipeline.analysis.evaluate import Evaluation
from ml_pipeline.assembly.compose import (
    checked_config,
    compose_config,
    stored_config,
    with_config_dir,
)
from ml_pipeline.assembly.load import load_agent
from ml_pipeline.assembly.plan import new_folder
from ml_pipeline.assembly.run import RunResult
from ml_pipeline.assembly.run import run as run_once
from ml_pipeline.assembly.sweeps import end_with_parent
from ml_pipeline.callbacks.pruning import Pruning
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.envs.factory import close_env
from ml_pipeline.errors import UserError, one_line
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.checkpoint import LATEST, checkpoint_path, load_checkpoint
from ml_pipeline.runs.console import say
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.runs.signatures import UntrustedError
from ml_pipeline.seeding import stream_seed
from ml_pipeline.signals import StopSignals
from ml_pipeline.study.database import DatabaseError
from ml_pipeline.study.folder import (
    MOST_DEATHS,
    StudyFolder,
    StudySettings,
    finished,
    held,
    running,
    why_hopeless,
)
from ml_pipeline.study.journal import HOST
from ml_pipeline.study.space import distributions, param_overrides
from ml_pipeline.training.contracts import Callback

_LOOK_SECONDS = 0.5


def work(name: str, *, first: int, parent: int) -> None:
    """Train trials until the study has all of them.

    ``first`` is the number of the first trial since the study was started. ``parent`` is the
    process that started this one; both end together.
    """
    if os.getppid() != parent:
        return  # it has ended already
    end_with_parent()
    with StopSignals() as signals:
        folder = StudyFolder.open(name)
        folder.waits = True
        while True:
            settings = folder.read()  # n_trials may have been raised
            try:
                with folder.alone():
                    trials = folder.read_trials()
                    if len(finished(trials)) >= settings.n_trials or why_hopeless(trials, first):
                        return
                    claimed = _claim(folder, settings, trials)
            except DatabaseError as error:  # its server went away in this moment
                say(str(error))
                claimed = None
            if claimed is None:
                time.sleep(_LOOK_SECONDS)  # other workers train the last trials, and may die
                continue
            trial, lock = claimed
            with held(folder, trial, lock):
                _run(settings, trial, signals)


def _claim(
    folder: StudyFolder, settings: StudySettings, trials: list[FrozenTrial]
) -> tuple[Trial, FileLock] | None:
    """A dead trial or else a new one, with its lock; None if other workers train all the rest."""
    for dead in running(trials):
        lock = folder.claim(dead)
        if lock is not None:
            trial = folder.open_trial(dead.number)
            _record_claim(trial)
            return trial, lock
    if len(trials) >= settings.n_trials:
        return None
    trial = folder.add_trial(_new_trial(settings, trials))
    lock = folder.trial_lock(trial.number)
    lock.acquire()
    return trial, lock


def _record_claim(trial: Trial) -> None:
    attrs = trial.user_attrs
    # A trial without a run folder had not begun to train.
    in_order = attrs.get("stopped") or "run_dir" not in attrs
    deaths = 0 if in_order else attrs.get("deaths", 0) + 1
    facts = {"host": HOST, "pid": os.getpid(), "stopped": False, "deaths": deaths}
    for key, value in facts.items():
        trial.set_user_attr(key, value)


def _new_trial(settings: StudySettings, trials: list[FrozenTrial]) -> FrozenTrial:
    """A trial whose parameters depend on the study's seed, its number and the trials before it."""
    number = len(trials)
    space = distributions(settings.space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna 4 calls both options experimental
        sampler = TPESampler(
            seed=stream_seed(settings.seed, f"sampler of trial {number}"),
            multivariate=True,
            constant_liar=True,  # avoid the parameters of trials that still run
        )
    # In memory: study.ask would write each parameter to the journal in a line of its own.
    beside = optuna.create_study(direction="maximize", sampler=sampler)
    beside.add_trials(trials)
    seed = stream_seed(settings.seed, f"trial {number}")
    return create_trial(
        state=TrialState.RUNNING,
        params=beside.ask(space).params,
        distributions=space,
        user_attrs={"host": HOST, "pid": os.getpid(), "seed": seed},
    )


def _run(settings: StudySettings, trial: Trial, signals: StopSignals) -> None:
    """Train the rest of a trial and report the result to Optuna."""
    say(f"trial {trial.number}: {trial.params}")
    try:
        if trial.user_attrs.get("deaths", 0) >= MOST_DEATHS:
            raise UserError(f"its worker died {MOST_DEATHS} times")
        value = None if _is_pruned(trial) else _trained_value(settings, trial)
        if value is None:
            trial.study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.study.tell(trial, value)
    except KeyboardInterrupt:
        signals.arrived()  # else it is raised again while the journal is locked by others
        with signals.shielded():
            trial.set_user_attr("stopped", True)
        raise
    except Exception as error:  # an env, a network or a disk failed; other trials may succeed
        reason = one_line(error)
        if isinstance(error, UserError):
            say(str(error))  # to the log, with the traceback of an env
        else:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {reason}"
        trial.set_user_attr("error", reason)
        trial.study.tell(trial, state=TrialState.FAIL)


def _is_pruned(trial: Trial) -> bool:
    return bool(trial.user_attrs.get("pruned"))  # the callback ``Pruning`` sets it


def _trained_value(settings: StudySettings, trial: Trial) -> float | None:
    """Train the rest of the trial's run, if any, and return its objective; None if pruned."""
    overrides = [
        *settings.overrides,
        *param_overrides(settings.space, trial.params),
        f"seed={trial.user_attrs['seed']}",
        f"objective={settings.objective}",
        *with_config_dir(settings.config_dir),
    ]
    cfg = compose_config(overrides)
    config = checked_config(cfg)
    run = _run_folder(trial, config)
    try:
        is_trained = _has_checkpoint(run) and _is_trained(run)
        value = recorded_value(run, settings.objective) if is_trained else math.nan
    except UntrustedError:  # trained with the key of another user; ``_train`` reports it
        is_trained = False
    if not is_trained:
        callbacks = _callbacks(trial, config)
        value = _train(run, cfg, overrides, trial.study.study_name, callbacks).objective
    trial.set_user_attr("seconds", run.read_summary().get("seconds"))
    if _is_pruned(trial):
        return None
    if math.isnan(value):
        raise UserError(f"objective={settings.objective} was never measured")
    return value


def _train(
    run: RunFolder,
    cfg: DictConfig,
    overrides: Sequence[str],
    study_name: str,
    callbacks: Mapping[str, Callback],
) -> RunResult:
    """Resume the run; without a checkpoint, start it again in the same folder."""
    if _has_checkpoint(run):
        resume = [f"resume={run.path}"]
        try:
            return run_once(compose_config(resume), resume, sweep=study_name, callbacks=callbacks)
        except UntrustedError:
            say(f"{run.path}: another user's key signed its files; training starts again")
    return run_once(cfg, overrides, sweep=study_name, callbacks=callbacks, folder=run)


def _has_checkpoint(run: RunFolder) -> bool:
    return run.config.is_file() and checkpoint_path(run, LATEST).is_file()


def _run_folder(trial: Trial, config: TrainConfig) -> RunFolder:
    """The run folder of a trial; its name is written to the journal before it is created."""
    path = trial.user_attrs.get("run_dir")
    if path is not None:
        return RunFolder(Path(path))
    run = new_folder(config)
    trial.set_user_attr("run_dir", str(run.path))
    return run


def _callbacks(trial: Trial, config: TrainConfig) -> dict[str, Callback]:
    evaluation = config.callbacks.get("evaluation") or {}
    every_steps = evaluation.get("eval_every_steps")
    if every_steps is None:  # no evaluation, or the user's own
        return {}
    reported = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
    return {"pruning": Pruning(trial, every_steps=every_steps, reported=reported)}


def _is_trained(run: RunFolder) -> bool:
    """Whether a run is complete although the journal has no result."""
    if run.read_summary().get("status") == "finished":
        return True
    config = stored_config(run)
    return int(load_checkpoint(run, LATEST)["env_steps"]) >= config.wanted_steps


def recorded_value(run: RunFolder, objective: str) -> float:
    """The objective of a complete run; repeats a last evaluation that a kill interrupted."""
    rows = read_metrics(run.metrics)
    values = [row[objective] for row in rows if row.get(objective)]
    config = stored_config(run)
    is_interrupted = objective == EVAL_RETURN and not (rows and rows[-1].get(EVAL_RETURN))
    if not is_interrupted or "evaluation" not in config.callbacks:
        return float(values[-1]) if values else math.nan
    n_episodes = int(config.callbacks["evaluation"]["n_episodes"])
    seed = stream_seed(config.seed, "evaluation")
    return evaluate_run(run.path, LATEST, n_episodes=n_episodes, seed=seed).mean


def evaluate_run(
    path: Path, checkpoint: str | None, *, n_episodes: int, seed: int, trust: bool = False
) -> Evaluation:
    """Greedy episodes of a run's policy; ``checkpoint`` None: the best, else the latest."""
    trained = load_agent(path, checkpoint, trust=trust)
    try:
        return trained.evaluate(n_episodes=n_episodes, seed=seed, deterministic=True)
    finally:
        close_env(trained.env)
