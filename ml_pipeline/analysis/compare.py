"""Groups of runs that differ only by seed, the claims that they support, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis import statistics
from ml_pipeline.analysis.run_data import ComparisonError, RunData, did_you_mean
from ml_pipeline.analysis.settings import (
    ALGORITHM,
    differing_keys,
    fitted,
    is_class,
    is_compared,
    is_off,
    short_names,
    shown_value,
)
from ml_pipeline.analysis.statistics import FEW_SEEDS, Array, iqm, iqm_with_interval
from ml_pipeline.errors import printable
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, counted, shown_return
from ml_pipeline.runs.console import plain_table

FIGURES = ("seeds", "IQM", "95 % interval", "env steps/s")  # of a group
_MOST_VERDICTS = 5
_MOST_NAMES = 5  # in one line
_LONGEST_NAME = 40  # characters of the name of a group
_NAME_KEYS = ("name", "logger.wandb.group")  # what a user may call a group
ALL_RUNS = "all runs"


class Group(NamedTuple):
    """Runs that differ only by seed."""

    name: str  # short and unique: what its runs are called, or the settings that single it out
    settings: dict[str, str]  # the keys that differ between groups; empty for a single group
    seeds: list[list[RunData]]  # per seed its runs: one, or several that --by puts together
    repeats: list[RunData]  # not used: another run has the same seed and settings

    @property
    def runs(self) -> list[RunData]:
        return [run for runs in self.seeds for run in runs]

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or ALL_RUNS

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
    check_keys(runs, by)
    configs = [run.config for run in runs]
    keys = list(by) or [key for key in differing_keys(configs) if is_compared(key, configs)]
    return sorted(made_groups(runs, keys), key=lambda group: _rank(group, metric))


def check_keys(runs: Sequence[RunData], keys: Sequence[str]) -> None:
    """Refuse a key of --by that no run has."""
    known = sorted({name for run in runs for name in run.config})
    for key in keys:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ComparisonError(f"--by {key}: not a config key of these runs{hint}")


def parted(runs: Sequence[RunData], keys: Sequence[str]) -> list[list[RunData]]:
    """The runs with equal values of ``keys``."""
    members: dict[str, list[RunData]] = {}
    for run in runs:
        members.setdefault(str([run.config.get(key) for key in keys]), []).append(run)
    return list(members.values())


def made_groups(runs: Sequence[RunData], keys: Sequence[str]) -> list[Group]:
    """A group for each combination of values of ``keys``."""
    members = parted(runs, keys)
    titles = short_names(keys)
    groups = []
    for name, same in zip(group_names(members, keys), members, strict=True):
        settings = {title: shown_value(same[0].config, key) for key, title in titles.items()}
        groups.append(Group(name, settings, *_independent(same)))
    return groups


def narrowed(group: Group, env: str) -> Group:
    """The group with only its runs of one env."""
    runs = [run for run in (*group.runs, *group.repeats) if run.env == env]
    seeds, repeats = _independent(runs)
    return group._replace(seeds=seeds, repeats=repeats)


def group_names(groups: Sequence[Sequence[RunData]], keys: Sequence[str]) -> list[str]:
    """A short name for each group, unlike all others.

    The name or W&B group of its runs if each group has its own, else the value of the first key
    that differs between all groups, or of as many keys as are needed.
    """
    if len(groups) == 1:
        return [ALL_RUNS]
    configs = [group[0].config for group in groups]
    own = next((each for key in _NAME_KEYS if (each := _own_names(groups, key))), None)
    names = own or [
        _joined(config, _telling(keys, configs), short_names(keys)) for config in configs
    ]
    names = [printable(name) for name in names]
    names = [n if len(n) <= _LONGEST_NAME else f"{n[: _LONGEST_NAME - 1]}…" for n in names]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def _own_names(groups: Sequence[Sequence[RunData]], key: str) -> list[str] | None:
    """The value of ``key`` in each group, or None unless each has one that no other group has."""
    values = [{run.config.get(key) for run in group} for group in groups]
    own = set.union(*values)
    if any(len(each) > 1 for each in values) or None in own or len(own) < len(values):
        return None
    return [str(each.pop()) for each in values]


def _telling(keys: Sequence[str], configs: Sequence[Mapping[str, object]]) -> list[str]:
    """One key whose values tell all groups apart; else several, each of which helps."""

    def n_told_apart(chosen: Sequence[str]) -> int:
        return len({tuple(shown_value(config, key) for key in chosen) for config in configs})

    for key in keys:
        if n_told_apart([key]) == len(configs):
            return [key]
    chosen: list[str] = []
    for key in keys:
        if n_told_apart([*chosen, key]) > n_told_apart(chosen):
            chosen.append(key)
    return chosen or list(keys)


def _joined(config: Mapping[str, object], keys: Sequence[str], titles: Mapping[str, str]) -> str:
    return " ".join(
        shown_value(config, key) if is_class(key) else f"{titles[key]}={shown_value(config, key)}"
        for key in keys
    )


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
    return {
        key: value
        for key, value in run.config.items()
        if not is_off(value) and is_compared(key, [run.config])
    }


def _rank(group: Group, metric: str) -> float:
    finals = group.finals(metric)
    return -float(iqm(finals)) if len(finals) else np.inf


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
            f"or origin as another: {listed(repeats)}"
        )
    merged = [
        f"{group.name} ({len(group.runs)} runs of {counted(len(group.seeds), 'seed')})"
        for group in groups
        if len(group.runs) > len(group.seeds)
    ]
    if merged:
        lines.append(f"runs of the same seed count as one, their mean: {listed(merged)}")
    dependent = [group.name for group in groups if _share_envs(group)]
    if dependent:
        lines.append(
            f"runs that share env seeds: {listed(dependent)} (env_seeds=adjacent). Their "
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
    return claims({group.name: [group.finals(metric)] for group in groups})


def claims(groups: Mapping[str, Sequence[Array]]) -> list[str]:
    """The claims about groups, the best first: the finals of each in one or several envs."""
    n_seeds = {name: min(map(len, finals)) for name, finals in groups.items()}
    tested = {name: groups[name] for name in groups if n_seeds[name] >= FEW_SEEDS}
    lines = statistics.verdicts(tested)
    n_hidden = len(lines) - _MOST_VERDICTS
    del lines[_MOST_VERDICTS:]
    if n_hidden > 0:
        lines.append(f"not listed: {next(iter(tested))} against {counted(n_hidden, 'lower group')}")
    n_envs = max(map(len, tested.values()), default=1)
    needed = statistics.needed_seeds(len(tested), n_envs)
    if any(n_seeds[name] < needed for name in tested):
        lines.append(
            f"{len(tested)} groups are {len(tested) * (len(tested) - 1) // 2} comparisons: a claim "
            f"needs {needed} or more seeds of each group; train more, or compare fewer groups"
        )
    few = [name for name in n_seeds if n_seeds[name] < FEW_SEEDS]
    if few:
        lines.append(
            f"fewer than {FEW_SEEDS} seeds, too few to claim a difference: {listed(few)}; "
            f"train {FEW_SEEDS} or more of each"
        )
    return lines


def listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def runs_table(groups: Sequence[Group], width: int) -> tuple[dict[str, list[str]], list[str]]:
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
    table = plain_table("group", *(["settings"] if _have_more(groups) else []))
    for column in FIGURES:
        table.add_column(column, justify="right")
    for group in groups:
        settings = [group.label] if _have_more(groups) else []
        table.add_row(group.name, *settings, *figures(group, metric))
    return table


def groups_cells(groups: Sequence[Group], metric: str) -> tuple[list[str], list[list[str]]]:
    """The titles and rows of a table with a column for each setting."""
    settings = list(groups[0].settings) if _have_more(groups) else []
    rows = [
        [group.name, *(group.settings[title] for title in settings), *figures(group, metric)]
        for group in groups
    ]
    return ["group", *settings, *FIGURES], rows


def _have_more(groups: Sequence[Group]) -> bool:
    """Whether groups have settings that their names do not show."""
    return any(group.label != group.name for group in groups)


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
