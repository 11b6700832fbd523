"""compare: print tables of several runs, and write a report with learning curves."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import add_shared, dated_folder, print_fitted, show_report
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
        help="run folder, folder of runs, of a sweep or a study, or wandb:ENTITY/PROJECT[/RUN]",
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
    from ml_pipeline.analysis import compare
    from ml_pipeline.analysis.paper_files import write_paper_files
    from ml_pipeline.analysis.report import write_report
    from ml_pipeline.analysis.run_data import chosen_metric
    from ml_pipeline.runs.console import wide_console

    runs = _read_runs(options.runs, options.metric, trust=options.trust)
    metric = chosen_metric(runs, options.metric)
    if len({each.env for each in runs}) > 1:
        _compare_envs(runs, metric, options)
        return
    groups = compare.grouped(runs, metric, options.by)
    print_fitted(lambda width: compare.runs_table(groups, width))
    print(f"\nfinal {metric}, interquartile mean (IQM) over the seeds:")
    wide_console().print(compare.groups_table(groups, metric))
    for line in (*compare.remarks(groups), *compare.verdicts(groups, metric)):
        print(line)
    folder = options.report or dated_folder("reports", runs[0].env)
    show_report(
        lambda: write_report(folder, groups, metric),
        is_asked_for=options.report is not None,
        opens=options.open,
    )
    if options.paper is not None:
        print(f"for a paper: {write_paper_files(options.paper, groups, metric)}")


def _compare_envs(runs: Sequence[RunData], metric: str, options: Namespace) -> None:
    """Compare runs of several envs by their normalised scores."""
    from ml_pipeline.analysis import compare
    from ml_pipeline.analysis.paper_files import write_suite_files
    from ml_pipeline.analysis.report import write_suite_report
    from ml_pipeline.analysis.suite import make_suite, suite_table, suite_verdicts
    from ml_pipeline.runs.console import wide_console

    suite = make_suite(runs, metric, options.by)
    groups = suite.all_groups
    print_fitted(lambda width: compare.runs_table(groups, width))
    print(
        f"\nfinal {metric}, interquartile mean (IQM) over the seeds; the score is 0 at the first "
        "value in an env, and 1 where the best group ends:"
    )
    wide_console().print(suite_table(suite, metric))
    for line in (*compare.remarks(groups), *suite.remarks, *suite_verdicts(suite)):
        print(line)
    folder = options.report or dated_folder("reports", suite.title)
    show_report(
        lambda: write_suite_report(folder, suite, metric),
        is_asked_for=options.report is not None,
        opens=options.open,
    )
    if options.paper is not None:
        print(f"for a paper: {write_suite_files(options.paper, suite, metric)}")


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
