"""study: start, watch and use a hyperparameter search."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path

from ml_pipeline.commands._arguments import add_shared, integer
from ml_pipeline.extras import import_extra

HELP = "search for good hyperparameters"


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="start | status | dashboard | best"
    )

    start = commands.add_parser("start", help="start a study, join it, or resume it")
    start.add_argument("name", metavar="NAME", help="the study is kept in studies/NAME/")
    start.add_argument(
        "overrides",
        nargs=REMAINDER,
        metavar="[--config-dir DIR] [KEY=VALUE ...]",
        help="settings of every trial, as for train; n_trials=, n_jobs= and space= set the study",
    )
    start.set_defaults(study=_start)

    status = commands.add_parser("status", help="trials, best values, trials per hour, ETA")
    status.add_argument("name", nargs="?", metavar="NAME", help="default: one line for each study")
    status.set_defaults(study=_status)

    dashboard = commands.add_parser("dashboard", help="show a study in a browser")
    dashboard.add_argument("name", metavar="NAME")
    dashboard.add_argument("--port", type=integer(1, 65_535), default=8080, help="default: 8080")
    dashboard.set_defaults(study=_dashboard)

    best = commands.add_parser("best", help="write conf/experiment/best_NAME.yaml")
    best.add_argument("name", metavar="NAME")
    best.add_argument(
        "--deploy", type=Path, metavar="DIR", help="replace the policy in DIR if this one is better"
    )
    best.add_argument(
        "--episodes",
        type=integer(1),
        default=100,
        metavar="N",
        help="episodes that decide which policy is better; default: 100",
    )
    best.add_argument(
        "--seed",
        type=integer(0),
        metavar="N",
        help="seed of the first episode; default: a new one each time",
    )
    add_shared(best, "--trust")
    best.set_defaults(study=_best)


def run(options: Namespace) -> None:
    import_extra("optuna", needed_by="study")
    options.study(options)


def _start(options: Namespace) -> None:
    from ml_pipeline.study.start import start

    start(options.name, options.overrides)


def _status(options: Namespace) -> None:
    from ml_pipeline.study.report import print_status

    print_status(options.name)


def _dashboard(options: Namespace) -> None:
    from ml_pipeline.study.dashboard import show

    show(options.name, port=options.port)


def _best(options: Namespace) -> None:
    from ml_pipeline.study.best import write_best

    write_best(
        options.name,
        deploy=options.deploy,
        n_episodes=options.episodes,
        seed=options.seed,
        trust=options.trust,
    )
