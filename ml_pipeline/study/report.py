"""What a study has come to: tables for ``study status``, lines for ``study start``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console, RenderableType
from rich.table import Table

from ml_pipeline.study.folder import (
    StudyFolder,
    StudySettings,
    all_studies,
    finished,
    running,
)

_RECENT = 50  # trials: what the pace is taken from
_BEST_SHOWN = 5


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The complete trial with the highest value, the earliest of equals."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return max(complete, key=lambda trial: trial.value or 0.0, default=None)


def trials_per_hour(trials: Sequence[FrozenTrial]) -> float | None:
    """By the trials that ended last, in the time in which at least one was trained.

    So a study that was stopped overnight keeps its pace, and workers side by side count.
    """
    ended = [trial for trial in finished(trials) if trial.datetime_complete is not None]
    ended = sorted(ended, key=_end)[-_RECENT:]
    busy, covered = 0.0, 0.0
    for trial in ended:
        end = _end(trial)
        begin = trial.datetime_start.timestamp() if trial.datetime_start else end
        seconds = trial.user_attrs.get("seconds")
        if "deaths" in trial.user_attrs and seconds is not None:
            begin = max(begin, end - seconds)  # taken up: nobody trained it in between
        busy += max(end - max(begin, covered), 0.0)
        covered = max(covered, end)
    return 3600.0 * len(ended) / busy if busy > 0 else None


def _end(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0


def headline(folder: StudyFolder, settings: StudySettings, trials: Sequence[FrozenTrial]) -> str:
    """How a start begins."""
    what = " ".join(settings.overrides) or "the defaults"
    begun = f", {len(running(trials))} begun" if running(trials) else ""
    return (
        f"study {folder.name}: {len(finished(trials))} of {settings.n_trials} trials done{begun}; "
        f"{what}; {len(settings.space)} keys searched; {folder.path}/"
    )


def trial_line(
    trial: FrozenTrial, trials: Sequence[FrozenTrial], settings: StudySettings, *, n_told: int
) -> str:
    """A trial that has ended."""
    told = f"trial {trial.number}: {_state(trial)}"
    if trial.state == TrialState.FAIL:
        told += f", {trial.user_attrs.get('error', 'no reason is known')}"
    elif trial.value is not None:
        told += f", {_figure(trial.value)}"
    best = best_trial(trials)
    if best is not None:
        told += f"; best {_figure(best.value)} by trial {best.number}"
    return f"{told}; {n_told} of {settings.n_trials}, {_pace(trials, settings)}"


def _pace(trials: Sequence[FrozenTrial], settings: StudySettings) -> str:
    pace = trials_per_hour(trials)
    if pace is None:
        return "ETA -"
    return f"{_number(pace)} trials/hour, ETA {_eta(trials, settings)}"


def _eta(trials: Sequence[FrozenTrial], settings: StudySettings) -> str:
    pace, left = trials_per_hour(trials), max(settings.n_trials - len(finished(trials)), 0)
    if left == 0:
        return "done"
    return "-" if pace is None else str(timedelta(seconds=round(3600.0 * left / pace)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _state(trial: FrozenTrial) -> str:
    return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()


def print_status(name: str | None) -> None:
    """Of one study, or a line for each."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 250  # a pipe has no edge to fold at
    if name is None:
        console.print(_studies_table())
        return
    folder = StudyFolder.open(name)
    for part in _status(folder):
        console.print(part)


def _studies_table() -> RenderableType:
    table = _table("study", "trials", "goal", "running", "best", "trials/hour", "ETA", "overrides")
    studies = all_studies()
    for folder in studies:
        settings, trials = folder.read(), folder.study().get_trials(deepcopy=False)
        best, pace = best_trial(trials), trials_per_hour(trials)
        table.add_row(
            folder.name,
            str(len(finished(trials))),
            str(settings.n_trials),
            str(sum(map(folder.is_alive, running(trials)))),
            _figure(best.value) if best is not None else "-",
            "-" if pace is None else _number(pace),
            _eta(trials, settings),
            " ".join(settings.overrides),
        )
    return table if studies else "no study was started here"


def _status(folder: StudyFolder) -> list[RenderableType]:
    settings, trials = folder.read(), folder.study().get_trials(deepcopy=False)
    states = Counter(map(_state, finished(trials)))
    open_trials = {
        t.number: "running" if folder.is_alive(t) else "stopped" for t in running(trials)
    }
    states.update(open_trials.values())
    counts = _table("complete", "pruned", "failed", "running", "stopped", "trials/hour", "ETA")
    pace = trials_per_hour(trials)
    counts.add_row(
        *(str(states[s]) for s in ("complete", "pruned", "failed", "running", "stopped")),
        "-" if pace is None else _number(pace),
        _eta(trials, settings),
    )
    parts: list[RenderableType] = [
        f"study {folder.name}: {len(finished(trials))} of {settings.n_trials} trials, "
        f"objective {settings.objective}, {' '.join(settings.overrides)}",
        counts,
    ]
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    ranked = sorted(complete, key=lambda trial: (-(trial.value or 0.0), trial.number))
    if ranked:
        parts += ["", "best", _trials_table(ranked[:_BEST_SHOWN], settings, {})]
    if open_trials:
        parts += ["", "begun", _trials_table(running(trials), settings, open_trials)]
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    if failed:
        last = failed[-1]
        parts += ["", f"last failure, trial {last.number}: {last.user_attrs.get('error', '-')}"]
    return parts


def _trials_table(
    trials: Sequence[FrozenTrial], settings: StudySettings, states: dict[int, str]
) -> Table:
    short = {key: key.rpartition(".")[2] for key in settings.space}
    table = _table("trial", "state", "value", "for", *short.values(), "run folder")
    for trial in trials:
        value = trial.value
        if value is None and trial.intermediate_values:  # the last that was reported
            value = trial.intermediate_values[max(trial.intermediate_values)]
        table.add_row(
            str(trial.number),
            states.get(trial.number, _state(trial)),
            _figure(value),
            _lasted(trial),
            *(_shown(trial.params.get(key)) for key in short),
            str(trial.user_attrs.get("run_dir", "-")),
        )
    return table


def _lasted(trial: FrozenTrial) -> str:
    if trial.user_attrs.get("seconds") is not None:
        return str(timedelta(seconds=round(trial.user_attrs["seconds"])))
    if trial.datetime_start is None:
        return "-"
    end = trial.datetime_complete or datetime.now()
    return str(timedelta(seconds=round((end - trial.datetime_start).total_seconds())))


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
