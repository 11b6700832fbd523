"""Suite: groups of runs in several envs, and their normalised scores.

The score of a run is 0 for the first value of the metric in its env, the interquartile mean over
all runs there, and 1 for the final value of the best group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis.charts import (
    MOST_GROUPS,
    improvement_chart,
    iqm_bar,
    profile_lines,
)
from ml_pipeline.analysis.compare import (
    Group,
    check_keys,
    claims,
    figures,
    listed,
    made_groups,
    narrowed,
    parted,
)
from ml_pipeline.analysis.figures import Chart
from ml_pipeline.analysis.run_data import RunData
from ml_pipeline.analysis.settings import ALGORITHM, differing_keys, is_compared
from ml_pipeline.analysis.statistics import (
    Array,
    iqm,
    iqm_over_envs,
)
from ml_pipeline.metrics import counted
from ml_pipeline.runs.console import plain_table

_SCORE = "normalised score"
_MEANING = "0: the first value in an env. 1: where the best group ends."


class Suite(NamedTuple):
    """Groups of runs that have the same settings in every env; the best is first."""

    groups: dict[str, list[Group]]  # by env; a group may be missing in some
    scores: dict[str, list[Array]]  # of each group in all envs with scores: those of its seeds
    remarks: list[str]  # what the scores leave out

    @property
    def all_groups(self) -> list[Group]:
        return [group for groups in self.groups.values() for group in groups]

    @property
    def title(self) -> str:
        return counted(len(self.groups), "env")


def make_suite(runs: Sequence[RunData], metric: str, by: Sequence[str] = ()) -> Suite:
    """Group by the keys ``by``, or by as few keys as tell all settings apart within each env."""
    check_keys(runs, by)
    in_env: dict[str, list[RunData]] = {}
    for run in runs:
        in_env.setdefault(run.env, []).append(run)
    keys = list(by) or _keys_within(list(in_env.values()))
    # Named together, so that a group has one name in all envs.
    named = made_groups(runs, keys)
    groups = {
        env: [own for group in named if (own := narrowed(group, env)).seeds]
        for env in sorted(in_env)
    }
    return _scored(groups, metric)


def _keys_within(envs: Sequence[Sequence[RunData]]) -> list[str]:
    """The keys that tell settings apart within an env.

    Presets of envs also differ between algorithms; a key that only follows another is left out.
    """
    differing: dict[str, None] = {}
    for runs in envs:
        configs = [run.config for run in runs]
        differing |= dict.fromkeys(k for k in differing_keys(configs) if is_compared(k, configs))

    def n_values(key: str) -> int:
        return len({str(run.config.get(key)) for runs in envs for run in runs})

    chosen: list[str] = []
    for key in sorted(differing, key=lambda each: (each != ALGORITHM, n_values(each))):
        if any(len(parted(runs, [*chosen, key])) > len(parted(runs, chosen)) for runs in envs):
            chosen.append(key)
    return chosen


def _scored(groups: dict[str, list[Group]], metric: str) -> Suite:
    names = list(dict.fromkeys(group.name for each in groups.values() for group in each))
    scores: dict[str, list[Array]] = {name: [] for name in names}
    remarks, n_scored = [], 0
    for env, each in groups.items():
        starts = [values[0] for g in each for r in g.runs if len(values := r.curve(metric)[1])]
        finals = {group.name: group.finals(metric) for group in each}
        start = float(iqm(np.array(starts))) if starts else np.nan
        best = max((float(iqm(ends)) for ends in finals.values() if len(ends)), default=np.nan)
        if not best > start:
            remarks.append(f"left out of the scores: {env}, as no group ends above its start")
            continue
        n_scored += 1
        for name, ends in finals.items():
            if len(ends):
                scores[name].append((ends - start) / (best - start))
    lacking = [name for name in names if len(scores[name]) < n_scored or not n_scored]
    if lacking:
        remarks.append(f"without a score, as they lack runs of an env: {listed(lacking)}")
    complete = {name: scores[name] for name in names if name not in lacking}
    order = sorted(complete, key=lambda name: -float(iqm_over_envs(complete[name]).value))
    rank = {name: place for place, name in enumerate([*order, *lacking])}
    ranked = {env: sorted(each, key=lambda g: rank[g.name]) for env, each in groups.items()}
    return Suite(ranked, {name: complete[name] for name in order}, remarks)


def suite_verdicts(suite: Suite) -> list[str]:
    """The claims about the best group against those that come next, over all envs."""
    return claims(suite.scores)


def suite_cells(suite: Suite, metric: str) -> tuple[list[str], list[list[str]]]:
    """The titles and rows of a table: the score of each group, and its value in each env."""
    rows = []
    for name in dict.fromkeys(group.name for group in suite.all_groups):
        score, interval = "-", "-"
        if name in suite.scores:
            value, low, high = map(float, iqm_over_envs(suite.scores[name]))
            score = f"{value:.2f}"
            interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "-"
        in_envs = [
            next((figures(g, metric)[1] for g in groups if g.name == name), "-")
            for groups in suite.groups.values()
        ]
        rows.append([name, score, interval, *in_envs])
    return ["group", "score", "95 % interval", *suite.groups], rows


def suite_table(suite: Suite, metric: str) -> Table:
    titles, rows = suite_cells(suite, metric)
    table = plain_table(titles[0])
    for title in titles[1:]:
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def suite_charts(suite: Suite) -> list[Chart]:
    """The charts of the best groups, at most ``MOST_GROUPS``: scores, improvement, profiles."""
    scores = dict(list(suite.scores.items())[:MOST_GROUPS])
    if not scores:
        return []
    bars = [iqm_bar(name, rank, parts) for rank, (name, parts) in enumerate(scores.items())]
    note = (
        "Interquartile mean over the seeds, averaged over the envs, with its 95 % interval. Each "
        f"tick is one run. {_MEANING}"
    )
    charts = [Chart("scores", "Score over all envs", _SCORE, "", note, bars=bars)]
    if len(scores) > 1:
        chart = improvement_chart(scores)
        title = f"{chart.title} over all envs"
        mean = f"{chart.note} Mean of the envs."
        charts.append(chart._replace(name="score_improvement", title=title, note=mean))
    lines = profile_lines({n: np.concatenate(p) for n, p in scores.items()}, shown=(0.0, 1.0))
    note = f"Share of the runs of all envs at or above each score. Higher is better. {_MEANING}"
    title = "Performance profile over all envs"
    profile = Chart("score_profile", title, _SCORE, "share of runs", note, lines=lines)
    return [*charts, profile]
