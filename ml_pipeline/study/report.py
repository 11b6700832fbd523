"""Progress of a study: tables for ``study status``, lines for ``study start``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from optuna.trial import FrozenTrial, TrialState
from rich.console import RenderableType
from rich.table import Table

from ml_pipeline.metrics import shown_return
from ml_pipeline.runs.console import plain_table, wide_console
from ml_pipeline.study.folder import StudyFolder, StudySettings, all_studies, finished, running

_RECENT = 50  # trials to measure the pace by
_BEST_SHOWN = 5
_STATES = ("complete", "pruned", "failed", "running", "stopped")


def ranked(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Complete trials, the highest value first; of equal ones, the earliest first."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return sorted(complete, key=lambda trial: (-(trial.value or 0.0), trial.number))


def trials_per_hour(trials: Sequence[FrozenTrial]) -> float | None:
    """Pace of the trials that ended last, excluding the time in which none was trained."""
    ended = [
        (trial.datetime_complete.timestamp(), trial)
        for trial in finished(trials)
        if trial.datetime_complete is not None
    ]
    ended = sorted(ended, key=lambda pair: pair[0])[-_RECENT:]
    busy = 0.0  # seconds with at least one trial
    covered = 0.0  # the end of the last such time
    for end, trial in ended:
        begin = trial.datetime_start.timestamp() if trial.datetime_start else end
        seconds = trial.user_attrs.get("seconds")
        if "deaths" in trial.user_attrs and seconds is not None:
            begin = max(begin, end - seconds)  # it waited for a worker to continue it
        busy += max(end - max(begin, covered), 0.0)
        covered = max(covered, end)
    return 3600.0 * len(ended) / busy if busy > 0 else None


def headline(folder: StudyFolder, settings: StudySettings, trials: Sequence[FrozenTrial]) -> str:
    """The first line of ``study start``."""
    begun = f", {len(running(trials))} begun" if running(trials) else ""
    return (
        f"study {folder.name}: {len(finished(trials))} of {settings.n_trials} trials done{begun}; "
        f"{' '.join(settings.overrides) or 'defaults'}; {len(settings.space)} keys searched; "
        f"{folder.path}/"
    )


def trial_line(
    trial: FrozenTrial, trials: Sequence[FrozenTrial], settings: StudySettings, *, n_done: int
) -> str:
    """The line of a trial that has ended."""
    line = f"trial {trial.number}: {_state(trial)}"
    if trial.state == TrialState.FAIL:
        line += f", {trial.user_attrs.get('error', 'for an unknown reason')}"
    elif trial.value is not None:
        line += f", {figure(trial.value)}"
    best = next(iter(ranked(trials)), None)
    if best is not None:
        line += f"; best {figure(best.value)} by trial {best.number}"
    pace, eta = _pace_and_eta(trials, settings)
    return f"{line}; {n_done} of {settings.n_trials}, {pace} trials/hour, ETA {eta}"


def _pace_and_eta(trials: Sequence[FrozenTrial], settings: StudySettings) -> tuple[str, str]:
    pace = trials_per_hour(trials)
    left = settings.n_trials - len(finished(trials))
    if pace is None:
        return "-", "-" if left > 0 else "done"
    eta = _duration(3600.0 * left / pace) if left > 0 else "done"
    return f"{pace:,.0f}" if pace >= 100 else f"{pace:.1f}", eta


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def figure(value: object) -> str:
    """A value of an objective or a parameter, as text."""
    if isinstance(value, float):
        return shown_return(value)
    return "-" if value is None else str(value)


def _state(trial: FrozenTrial) -> str:
    return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()


def print_status(name: str | None) -> None:
    """Print the state of one study, or a line for each."""
    parts = [_studies_table()] if name is None else _status(StudyFolder.open(name))
    console = wide_console()
    for part in parts:
        console.print(part)


def _studies_table() -> RenderableType:
    table = plain_table(
        "study", "trials", "goal", "running", "best", "trials/hour", "ETA", "overrides"
    )
    for folder in all_studies():
        settings = folder.read()
        trials = folder.read_trials()
        n_running = sum(folder.is_alive(trial) for trial in running(trials))
        table.add_row(
            folder.name,
            str(len(finished(trials))),
            str(settings.n_trials),
            str(n_running),
            next((figure(best.value) for best in ranked(trials)), "-"),
            *_pace_and_eta(trials, settings),
            " ".join(settings.overrides),
        )
    return table if table.row_count else "no studies here"


def _status(folder: StudyFolder) -> list[RenderableType]:
    settings = folder.read()
    trials = folder.read_trials()
    states = {trial.number: _state(trial) for trial in trials}
    for trial in running(trials):
        states[trial.number] = "running" if folder.is_alive(trial) else "stopped"
    n_in = Counter(states.values())
    counts = plain_table(*_STATES, "trials/hour", "ETA")
    counts.add_row(*(str(n_in[state]) for state in _STATES), *_pace_and_eta(trials, settings))
    parts: list[RenderableType] = [
        f"study {folder.name}: {len(finished(trials))} of {settings.n_trials} trials, "
        f"objective {settings.objective}, {' '.join(settings.overrides)}",
        counts,
    ]
    for title, shown in (("best", ranked(trials)[:_BEST_SHOWN]), ("begun", running(trials))):
        if shown:
            parts += ["", title, _trials_table(shown, settings, states)]
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    if failed:
        error = failed[-1].user_attrs.get("error", "-")
        parts += ["", f"last failure, trial {failed[-1].number}: {error}"]
    return parts


def _trials_table(
    trials: Sequence[FrozenTrial], settings: StudySettings, states: dict[int, str]
) -> Table:
    names = (key.rpartition(".")[2] for key in settings.space)
    table = plain_table("trial", "state", "value", "for", *names, "run folder")
    for trial in trials:
        value = trial.value
        if value is None and trial.intermediate_values:
            value = trial.intermediate_values[max(trial.intermediate_values)]
        table.add_row(
            str(trial.number),
            states[trial.number],
            figure(value),
            _lasted(trial),
            *(figure(trial.params.get(key)) for key in settings.space),
            str(trial.user_attrs.get("run_dir", "-")),
        )
    return table


def _lasted(trial: FrozenTrial) -> str:
    seconds = trial.user_attrs.get("seconds")
    if seconds is None and trial.datetime_start is not None:
        end = trial.datetime_complete or datetime.now()
        seconds = (end - trial.datetime_start).total_seconds()
    return "-" if seconds is None else _duration(seconds)
