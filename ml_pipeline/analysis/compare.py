"""Groups of runs that differ only by seed, the claims that they support, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis import statistics
from ml_pipeline.analysis.run_data import ComparisonError, RunData, did_you_mean
from ml_pipeline.analysis.settings import (
    ALGORITHM,
    differing_keys,
    fitted,
    is_compared,
    short_names,
    shown_value,
)
from ml_pipeline.analysis.statistics import FEW_SEEDS, Array, iqm, iqm_with_interval
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, counted, shown_return
from ml_pipeline.runs.console import plain_table

FIGURES = ("seeds", "IQM", "95 % interval", "env steps/s")  # of a group
_MOST_VERDICTS = 5
_MOST_NAMES = 5  # in one line


class Group(NamedTuple):
    """Runs that differ only by seed."""

    name: str  # A, B, ...: the best group is A
    settings: dict[str, str]  # the keys that differ between groups; empty for a single group
    seeds: list[list[RunData]]  # per seed its runs: one, or several that --by puts together
    repeats: list[RunData]  # not used: another run has the same seed and settings

    @property
    def runs(self) -> list[RunData]:
        return [run for runs in self.seeds for run in runs]

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all runs"

    def per_seed(self, value: Callable[[RunData], Any]) -> Array:
        """``value`` of each seed, [n_seeds, ...]; runs of one seed are averaged."""
        return np.array([np.mean([value(run) for run in runs], axis=0) for runs in self.seeds])

    def finals(self, metric: str) -> Array:
        """The last value of each seed that has one."""
        values = self.per_seed(lambda run: run.final(metric))
        return np.asarray(values[np.isfinite(values)])


def grouped(runs: Sequence[RunData], metric: str, by: Sequence[str] = ()) -> list[Group]:
    """Group by the keys ``by``, or by all differing keys that can affect learning.

    The group with the highest final ``metric`` is first.
    """
    configs = [run.config for run in runs]
    known = sorted({name for config in configs for name in config})
    for key in by:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ComparisonError(f"--by {key}: not a config key of these runs{hint}")
    keys = list(by) or [key for key in differing_keys(configs) if is_compared(key, configs)]
    names = short_names(keys)
    members: dict[str, list[RunData]] = {}
    for run in runs:
        members.setdefault(str([run.config.get(key) for key in keys]), []).append(run)
    groups = []
    named = {"name": "name"} if _are_named(members.values()) else {}
    for same in members.values():
        shown = named | names
        settings = {title: shown_value(same[0].config, key) for key, title in shown.items()}
        groups.append(Group("", settings, *_independent(same)))
    ranked = sorted(groups, key=lambda group: _rank(group, metric))
    return [group._replace(name=_letters(index)) for index, group in enumerate(ranked)]


def _are_named(groups: Iterable[Sequence[RunData]]) -> bool:
    """Whether each group has one name of its own."""
    names = [{run.config.get("name") for run in group} for group in groups]
    own = set.union(*names)
    return all(len(each) == 1 for each in names) and None not in own and len(own) == len(names) > 1


def _independent(runs: Sequence[RunData]) -> tuple[list[list[RunData]], list[RunData]]:
    """The runs of each seed, and the repeats: of equal settings, only the longest run counts."""
    seeds: list[list[RunData]] = []
    repeats = []
    for run in sorted(runs, key=lambda run: -run.env_steps):
        shared = next((s for s in seeds if any(run.shares_seed(other) for other in s)), None)
        if shared is None:
            seeds.append([run])
        elif any(_learning_settings(run) == _learning_settings(other) for other in shared):
            repeats.append(run)
        else:
            shared.append(run)
    return seeds, repeats


def _learning_settings(run: RunData) -> dict[str, object]:
    return {key: value for key, value in run.config.items() if is_compared(key, [run.config])}


def _rank(group: Group, metric: str) -> float:
    finals = group.finals(metric)
    return -float(iqm(finals)) if len(finals) else np.inf


def _letters(index: int) -> str:
    """A to Z, then AA to AZ, BA, ..."""
    more, last = divmod(index, len(ascii_uppercase))
    return (_letters(more - 1) if more else "") + ascii_uppercase[last]


def remarks(groups: Sequence[Group]) -> list[str]:
    """Lines on the settings and runs that are left out, and on runs that count together."""
    lines = []
    configs = [run.config for group in groups for run in group.runs]
    algorithms = sorted({shown_value(config, ALGORITHM) for config in configs})
    if len(algorithms) > 1:
        lines.append(f"left out: agent. keys that not all of {', '.join(algorithms)} have")
    repeats = [str(run.run.path) for group in groups for run in group.repeats]
    if repeats:
        lines.append(
            f"left out: {counted(len(repeats), 'run')} with the same settings and the same seed "
            f"or origin as another: {_listed(repeats)}"
        )
    merged = [
        f"{group.name} has {len(group.runs)} runs of {counted(len(group.seeds), 'seed')}"
        for group in groups
        if len(group.runs) > len(group.seeds)
    ]
    if merged:
        lines.append(f"runs of the same seed count as one, their mean: {_listed(merged)}")
    dependent = [group.name for group in groups if _share_envs(group)]
    if dependent:
        lines.append(
            f"the runs of {_listed(dependent)} share env seeds (env_seeds=adjacent), so their "
            "intervals are too narrow; train them again, or with seeds that are n_envs apart"
        )
    return lines


def _share_envs(group: Group) -> bool:
    """Whether runs of other seeds have an env in common, as in versions without ``env_seeds``."""
    firsts = []
    for runs in group.seeds:
        config = runs[0].config
        seed, n_envs = config.get("seed"), config.get("n_envs")
        if config.get("env_seeds", "adjacent") == "adjacent" and isinstance(seed, int):
            firsts.append((seed, n_envs if isinstance(n_envs, int) else 1))
    firsts.sort()
    return any(seed + n > later for (seed, n), (later, _) in pairwise(firsts))


def verdicts(groups: Sequence[Group], metric: str) -> list[str]:
    """The claims that the runs support: the best group against those that come next."""
    if len(groups) == 1:
        n_seeds = len(groups[0].finals(metric))
        return ["one seed: an interval needs at least two"] if n_seeds == 1 else []
    finals = {group.name: group.finals(metric) for group in groups}
    tested = {name: each for name, each in finals.items() if len(each) >= FEW_SEEDS}
    lines = statistics.verdicts(tested)
    n_hidden = len(lines) - _MOST_VERDICTS
    del lines[_MOST_VERDICTS:]
    if n_hidden > 0:
        lines.append(f"not listed: {next(iter(tested))} against {counted(n_hidden, 'lower group')}")
    needed = statistics.needed_seeds(len(tested))
    if any(len(each) < needed for each in tested.values()):
        lines.append(
            f"{len(tested)} groups are {len(tested) * (len(tested) - 1) // 2} comparisons: a claim "
            f"needs {needed} or more seeds of each group; train more, or compare fewer groups"
        )
    few = [name for name in finals if len(finals[name]) < FEW_SEEDS]
    if few:
        lines.append(
            f"fewer than {FEW_SEEDS} seeds, too few to claim a difference: {_listed(few)}; "
            f"train {FEW_SEEDS} or more of each"
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def runs_table(groups: Sequence[Group], width: int) -> tuple[Table, list[str]]:
    """A row per run, with the keys that differ within groups, and the columns that did not fit."""
    rows = [(group.name, run) for group in groups for run in group.runs]
    rows += [(f"{group.name}, repeat", run) for group in groups for run in group.repeats]
    runs = [run for _, run in rows]
    keys = dict.fromkeys(
        key
        for group in groups
        for key in differing_keys([run.config for run in (*group.runs, *group.repeats)])
    )
    evals = [run.curve(EVAL_RETURN)[1] for run in runs]
    needed = {
        "run": [str(run.run.path) for run in runs],
        "group": [name for name, _ in rows],
    }
    extra = {
        "seed": [shown_value(run.config, "seed") for run in runs],
        "status": [str(run.summary.get("status", "unknown")) for run in runs],
        "last eval": [_shown(run.final(EVAL_RETURN)) for run in runs],
        "env steps": [f"{run.env_steps:,}" for run in runs],
        "best eval": [_shown(max(values, default=np.nan)) for values in evals],
        "mean(100)": [_shown(run.final(MEAN_RETURN)) for run in runs],
        "seconds": [str(run.summary.get("seconds", "-")) for run in runs],
    }
    for key, name in short_names([key for key in keys if key != "seed"]).items():
        extra.setdefault(name, [shown_value(run.config, key) for run in runs])
    return fitted(needed, extra, width)


def groups_table(groups: Sequence[Group], metric: str) -> Table:
    """A row per group: the interquartile mean (IQM) over its seeds, with its interval."""
    table = plain_table("group", "settings")
    for column in FIGURES:
        table.add_column(column, justify="right")
    for group in groups:
        table.add_row(group.name, group.label, *figures(group, metric))
    return table


def figures(group: Group, metric: str) -> list[str]:
    """The texts of ``FIGURES``."""
    finals = group.finals(metric)
    value, low, high = iqm_with_interval(finals) if len(finals) else [np.array(np.nan)] * 3
    interval = (
        f"{shown_return(float(low))} to {shown_return(float(high))}" if np.isfinite(low) else "-"
    )
    speeds = group.per_seed(lambda run: run.steps_per_second())
    speeds = speeds[np.isfinite(speeds)]
    speed = float(iqm(speeds)) if len(speeds) else np.nan
    n_seeds = len(group.seeds)
    seeds = str(n_seeds) if len(finals) == n_seeds else f"{len(finals)} of {n_seeds}"
    return [seeds, _shown(float(value)), interval, f"{speed:,.0f}" if np.isfinite(speed) else "-"]


def _shown(value: float) -> str:
    return shown_return(value) if np.isfinite(value) else "-"
