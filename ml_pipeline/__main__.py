"""The door beside training: ``python -m ml_pipeline evaluate | compare | study``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends with one line and exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return int(getattr(stop, "exit_code", 130))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ml_pipeline",
        description="Look at what train_ppo.py has trained; search for good settings.",
    )
    commands = parser.add_subparsers(title="commands", required=True)

    evaluate = commands.add_parser("evaluate", help="play episodes with a trained agent")
    evaluate.add_argument("run", help="a run folder, runs/<env>/<date>_<time>_<hex>")
    evaluate.add_argument(
        "--episodes", type=partial(_whole_number, least=1), default=20, help="default: 20"
    )
    evaluate.add_argument(
        "--deterministic", action="store_true", help="the likeliest action, not a sampled one"
    )
    evaluate.add_argument(
        "--checkpoint", choices=("best", "latest"), help="default: best where there is one"
    )
    evaluate.add_argument(
        "--seed",
        type=partial(_whole_number, least=0),
        help="of the first episode; default: from the run's",
    )
    evaluate.set_defaults(command=_evaluate)

    compare = commands.add_parser("compare", help="put runs side by side")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curves")
    compare.set_defaults(command=_compare)

    study = commands.add_parser("study", help="search for good hyperparameters")
    _add_study_commands(
        study.add_subparsers(
            title="commands", required=True, metavar="start | status | dashboard | best"
        )
    )
    return parser


def _add_study_commands(commands: Any) -> None:
    start = commands.add_parser("start", help="begin a study, join it, or go on with it")
    start.add_argument("name", help="of the study: studies/NAME/")
    start.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of every trial, as for train_ppo.py; n_trials=, n_jobs= and space= are the study's",
    )
    start.set_defaults(command=_study_start)

    status = commands.add_parser("status", help="trials, best values, trials an hour, ETA")
    status.add_argument("name", nargs="?", help="default: a line for each study")
    status.set_defaults(command=_study_status)

    dashboard = commands.add_parser("dashboard", help="look at a study in a browser")
    dashboard.add_argument("name")
    dashboard.add_argument(
        "--port", type=partial(_whole_number, least=1), default=8080, help="default: 8080"
    )
    dashboard.set_defaults(command=_study_dashboard)

    best = commands.add_parser("best", help="write conf/experiment/best_NAME.yaml")
    best.add_argument("name")
    best.add_argument(
        "--deploy", type=Path, metavar="DIR", help="keep the best policy there, if it is better"
    )
    best.add_argument(
        "--episodes",
        type=partial(_whole_number, least=1),
        default=100,
        help="that decide whether it is better; default: 100",
    )
    best.add_argument(
        "--seed",
        type=partial(_whole_number, least=0),
        help="of the first of them; default: a new one each time",
    )
    best.set_defaults(command=_study_best)

    work = commands.add_parser("work")  # what start starts
    work.add_argument("name")
    work.add_argument("--first", type=int, required=True)
    work.add_argument("--parent", type=int, required=True)
    work.set_defaults(command=_study_work)


def _whole_number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
    return int(text)


def _evaluate(options: argparse.Namespace) -> None:
    # Imported here: torch takes seconds, and --help must not.
    from ml_pipeline.build import load_agent
    from ml_pipeline.runs.evaluate import MAX_EPISODE_STEPS, evaluate
    from ml_pipeline.seeding import stream_seed

    trained = load_agent(options.run, options.checkpoint)
    seed = options.seed
    if seed is None:
        seed = stream_seed(trained.seed, "evaluate command")
    result = evaluate(
        trained.agent,
        trained.env,
        n_episodes=options.episodes,
        seed=seed,
        deterministic=options.deterministic,
    )
    trained.env.close()
    actions = "greedy" if options.deterministic else "sampled"
    print(
        f"{trained.env_name}, checkpoint {trained.checkpoint} of env step {trained.env_steps:,}, "
        f"{options.episodes} episodes from seed {seed}, {actions} actions"
    )
    print(
        f"return: mean {result.mean:.1f}  std {result.std:.1f}  "
        f"min {result.min:.1f}  max {result.max:.1f}   mean length {result.mean_length:.1f}"
    )
    if result.n_cut:
        print(f"{result.n_cut} episodes did not end and were cut at {MAX_EPISODE_STEPS:,} steps")


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    from ml_pipeline.build import plain_config
    from ml_pipeline.runs.compare import comparison_table, draw_curves, read_run

    runs = []
    for path in options.runs:
        try:
            runs.append(read_run(path, plain_config(path)))
        except UserError as error:  # runs/<env>/* may hold one that was stopped as it began
            print(f"left out: {error}", file=sys.stderr)
    if not runs:
        raise UserError("nothing is left to compare")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 250  # a pipe has no edge to fold at
    console.print(comparison_table(runs))
    if options.plot is not None:
        draw_curves(runs, options.plot)
        print(f"learning curves: {options.plot}")


def _study_start(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.start import start

    start(options.name, options.overrides)


def _study_work(options: argparse.Namespace) -> None:
    from ml_pipeline.study.trials import work

    work(options.name, first=options.first, parent=options.parent)


def _study_status(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.report import print_status

    print_status(options.name)


def _study_dashboard(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.dashboard import show

    show(options.name, port=options.port)


def _study_best(options: argparse.Namespace) -> None:
    import_extra("optuna", needed_by="study")
    from ml_pipeline.study.best import write_best

    write_best(options.name, deploy=options.deploy, n_episodes=options.episodes, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
