"""compare: print tables of several runs, and write a report with learning curves."""

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import (
    LATEST_RUN,
    add_shared,
    chosen_run,
    dated_folder,
    print_fitted,
    show_report,
)
from ml_pipeline.config.train import RUN_ROOT
from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra

if TYPE_CHECKING:
    from ml_pipeline.analysis.run_data import RunData

HELP = "compare runs in tables and in a report"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=f"run folder, {LATEST_RUN}, folder of runs, of a sweep or a study, "
        "or wandb:ENTITY/PROJECT[/RUN]",
    )
    parser.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="KEY",
        help="group runs by this config key; repeatable; default: every key that differs",
    )
    parser.add_argument(
        "--metric", help="column of metrics.csv; default: the return of the evaluation"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="folder of the report; default: runs/reports/<env>_<date>_<time>",
    )
    parser.add_argument(
        "--paper",
        type=Path,
        metavar="DIR",
        help="also write the figures as PDF, SVG and CSV, and the table as CSV and LaTeX",
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    add_shared(parser, "--trust")


def run(options: Namespace) -> None:
    gc.disable()  # it would take 9 % of the time, and the program ends soon
    try:
        _compare(options)
    finally:
        gc.enable()


def _compare(options: Namespace) -> None:
    from ml_pipeline.analysis import compare, paper_files, report, suite
    from ml_pipeline.analysis.run_data import chosen_metric
    from ml_pipeline.runs.console import wide_console

    runs = _read_runs(options.runs, options.metric, trust=options.trust)
    metric = chosen_metric(runs, options.metric)
    heading = f"final {metric}, interquartile mean (IQM) over the seeds"
    if len({each.env for each in runs}) == 1:
        groups, title = compare.grouped(runs, metric, options.by), runs[0].env
        table, verdicts = compare.groups_table(groups, metric), compare.verdicts(groups, metric)
        write_report = partial(report.write_report, groups=groups, metric=metric)
        write_files = partial(paper_files.write_paper_files, groups=groups, metric=metric)
    else:  # by their normalised scores
        envs = suite.make_suite(runs, metric, options.by)
        groups, title = envs.all_groups, envs.title
        heading += "; the score is 0 at the first value in an env, and 1 where the best group ends"
        table = suite.suite_table(envs, metric)
        verdicts = [*envs.remarks, *suite.suite_verdicts(envs)]
        write_report = partial(report.write_suite_report, suite=envs, metric=metric)
        write_files = partial(paper_files.write_suite_files, suite=envs, metric=metric)
    print_fitted(lambda width: compare.runs_table(groups, width))
    print(f"\n{heading}:")
    wide_console().print(table)
    for line in (*compare.remarks(groups), *verdicts):
        print(line)
    folder = options.report or dated_folder("reports", title)
    show_report(
        lambda: write_report(folder),
        is_asked_for=options.report is not None,
        opens=options.open,
    )
    if options.paper is not None:
        print(f"for a paper: {write_files(options.paper)}")


def _read_runs(arguments: Sequence[str], metric: str | None, *, trust: bool) -> list[RunData]:
    from ml_pipeline.analysis.run_data import read_run, with_chosen_networks
    from ml_pipeline.assembly.compose import plain_config

    runs = []
    for path in (path for given in arguments for path in _run_folders(given)):
        try:
            runs.append(read_run(path, plain_config(path, trust=trust), metric, trust=trust))
        except UserError as error:  # runs/<env>/* may contain a run that stopped at its start
            print(f"left out: {error}", file=sys.stderr)
    if not runs:
        raise UserError("no run is left to compare")
    return with_chosen_networks(runs)


def _run_folders(given: str) -> Sequence[Path | str]:
    """The runs that an argument names: one, or those of a folder, sweep, study or W&B project."""
    from ml_pipeline.analysis.wandb_runs import PREFIX, download
    from ml_pipeline.assembly.sweeps import job_runs, read_jobs

    if given.startswith(PREFIX):
        return download(given)
    given = chosen_run(given, Path(RUN_ROOT))
    if "*" in given and not os.path.lexists(given):  # PowerShell and cmd leave it to the program
        matches = [path for path in sorted(glob(given)) if os.path.isdir(path)]
        return [run for path in matches for run in _run_folders(path)] or [given]
    if not os.path.isdir(given):  # unlike Path.is_dir, False for a name that is too long
        return [given]
    if (Path(given) / "study.yaml").is_file():
        return _study_runs(Path(given))
    if read_jobs(Path(given)):
        return job_runs(Path(given))
    inside = sorted(path.parent for path in Path(given).glob("*/config.yaml"))
    is_run = (Path(given) / "config.yaml").is_file()
    return inside if inside and not is_run else [given]


def _study_runs(path: Path) -> list[Path]:
    import_extra("optuna", needed_by=str(path))
    from ml_pipeline.study.folder import STUDY_ROOT, StudyFolder

    study = StudyFolder(path.resolve().name)
    study.check()
    if not (study.path.is_dir() and study.path.samefile(path)):
        raise UserError(f"{path}: not in {STUDY_ROOT}/ here; change to the folder that has it")
    return study.run_dirs()
