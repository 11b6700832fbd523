"""The report of a comparison: verdicts, tables and charts of groups of runs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ml_pipeline.analysis import page
from ml_pipeline.analysis.charts import MOST_GROUPS, make_charts
from ml_pipeline.analysis.compare import Group, groups_cells, remarks, verdicts
from ml_pipeline.analysis.settings import differing_keys
from ml_pipeline.analysis.suite import Suite, suite_cells, suite_charts, suite_verdicts
from ml_pipeline.metrics import counted, shown_return

_OF_EACH_ENV = ("curves", "final")  # charts in a report on several envs


def write_report(folder: Path, groups: Sequence[Group], metric: str) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    runs = [run for group in groups for run in group.runs]
    counts = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    sections = [page.Section("", _overview(groups, metric))]
    return _write(folder, runs[0].env_name, counts, sections, groups, metric)


def write_suite_report(folder: Path, suite: Suite, metric: str) -> Path:
    """Write the page of runs in several envs, with their scores first."""
    groups = suite.all_groups
    runs = [run for group in groups for run in group.runs]
    lines = [*remarks(groups), *suite.remarks, *suite_verdicts(suite)]
    if len(suite.scores) > MOST_GROUPS:
        lines.append(f"the charts show the {MOST_GROUPS} best of {len(suite.scores)} groups")
    lines.append("a score is 0 at the first value in an env, and 1 where the best group ends")
    scores: list[page.Part] = [
        page.Bullets(lines),
        page.Table(*suite_cells(suite, metric)),
        page.Figures(suite_charts(suite)),
    ]
    envs = [page.Section(env, _env(env, each, metric)) for env, each in suite.groups.items()]
    sections = [page.Section("", scores), *envs]
    return _write(folder, suite.title, counted(len(runs), "run"), sections, groups, metric)


def _write(
    folder: Path,
    heading: str,
    counts: str,
    sections: Sequence[page.Section],
    groups: Sequence[Group],
    metric: str,
) -> Path:
    report = page.Page(
        title=f"{heading}: {counts}",
        heading=heading,
        facts=f"{counts}, compared by the final {metric} on {page.now_text()}. "
        "IQM is the interquartile mean over the seeds.",
        sections=[
            *sections,
            page.Section("Config differences", [_differences(groups)]),
            page.Section("Runs", [_runs_table(folder, groups, metric)]),
        ],
    )
    return page.write_page(folder / "report.html", report)


def _env(env: str, groups: Sequence[Group], metric: str) -> list[page.Part]:
    """One of several envs."""
    charts = [
        chart._replace(name=f"{file_name(env)}_{chart.name}", title=f"{env}: {chart.title}")
        for chart in make_charts(groups, metric)
        if chart.name in _OF_EACH_ENV
    ]
    return [page.Table(*groups_cells(groups, metric)), page.Figures(charts)]


def file_name(env: str) -> str:
    """An env as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", env)


def _overview(groups: Sequence[Group], metric: str) -> list[page.Part]:
    lines = [*remarks(groups), *verdicts(groups, metric)]
    if len(groups) > MOST_GROUPS:
        lines.append(f"the charts show the {MOST_GROUPS} best of {len(groups)} groups")
    return [
        page.Bullets(lines),
        page.Table(*groups_cells(groups, metric)),
        page.Figures(make_charts(groups, metric)),
    ]


def _differences(groups: Sequence[Group]) -> page.Part:
    """The keys that differ, with the number of runs per value."""
    runs = [run for group in groups for run in group.runs]
    rows = []
    for key in differing_keys([run.config for run in runs]):
        counts = Counter(str(run.config.get(key, "-")) for run in runs)
        rows.append([key, ", ".join(f"{value} ({count})" for value, count in counts.items())])
    if not rows:
        return page.Paragraph("All configs are equal.")
    return page.Table(["key", "values (number of runs)"], rows)


def _runs_table(folder: Path, groups: Sequence[Group], metric: str) -> page.Table:
    members = []
    for group in groups:
        members += [(group.name, run) for run in group.runs]
        members += [(f"{group.name}, repeat", run) for run in group.repeats]
    rows = [
        [
            page.Link(os.path.relpath(run.run.path, folder), run.run.name),
            name,
            run.config.get("seed", "-"),
            run.summary.get("status", "-"),
            f"{run.env_steps:,}",
            shown_return(run.final(metric)),
            str(run.summary.get("git_commit") or "-")[:9],
        ]
        for name, run in members
    ]
    return page.Table(["run", "group", "seed", "status", "env steps", metric, "commit"], rows)
