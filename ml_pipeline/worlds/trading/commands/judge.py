"""judge: walk trading runs over held-out bars and say whether an edge can be claimed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import (
    RUN_HELP,
    add_results,
    add_shared,
    chosen_run,
    dated_folder,
    integer,
    show_results,
)
from ml_pipeline.errors import UserError

if TYPE_CHECKING:
    from ml_pipeline.runs.run_folder import RunFolder

HELP = "walk trading runs over held-out bars and say whether an edge can be claimed"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help=f"{RUN_HELP}; several share the capital"
    )
    parser.add_argument(
        "--period",
        choices=("test", "validation", "train", "all"),
        default="test",
        help="default: test",
    )
    parser.add_argument(
        "--trials",
        type=integer(1),
        metavar="N",
        help="how many runs these were chosen from; default: those of their study or sweep",
    )
    add_shared(parser, "--checkpoint")
    add_results(parser, "judgements/<env>_<period>")
    add_shared(parser, "--root", "--trust")


def run(options: Namespace) -> None:
    from ml_pipeline.runs.console import wide_console
    from ml_pipeline.runs.run_folder import RunFolder
    from ml_pipeline.worlds.trading.judge import judge_runs
    from ml_pipeline.worlds.trading.report import table, write_report, write_results

    paths = [chosen_run(each, options.root) for each in options.runs]
    runs = [RunFolder.open(path, trust=options.trust) for path in paths]
    n_trials = options.trials or _n_trials(runs)
    judgement = judge_runs(
        paths,
        period=options.period,
        n_trials=n_trials,
        checkpoint=options.checkpoint,
        trust=options.trust,
    )
    wide_console().print(table(judgement))
    print(judgement.verdict)
    for line in judgement.remarks:
        print(line)
    env = runs[0].path.resolve().parent.name
    folder = options.out or dated_folder("judgements", f"{env}_{options.period}")
    write_results(folder, judgement)
    show_results(folder, lambda folder: write_report(folder, judgement), opens=options.open)


def _n_trials(runs: list[RunFolder]) -> int:
    """The trials of all studies and sweeps that the runs belong to; a single run counts as one."""
    sweeps: dict[Path, int] = {}
    n_single = 0
    for each in runs:
        name = each.read_summary().get("sweep")
        if name is None:
            n_single += 1
        else:
            folder, n_trials = _counted(each, str(name))
            sweeps[folder] = n_trials
    return n_single + sum(sweeps.values())


def _counted(each: RunFolder, name: str) -> tuple[Path, int]:
    """The folder of a study or sweep, and how many trials or jobs have begun."""
    from ml_pipeline.assembly.sweeps import read_jobs

    sweep = each.path.resolve().parents[1] / "sweeps" / name
    if sweep.is_dir():
        return sweep, len(read_jobs(sweep))
    if (Path("studies") / name / "study.yaml").is_file():
        from ml_pipeline.study.folder import StudyFolder

        study = StudyFolder.open(name)
        return study.path.resolve(), len(study.study().get_trials(deepcopy=False))
    raise UserError(
        f"{each.path}: its study or sweep {name} is not here, so the number of trials is "
        "unknown; add --trials N"
    )
