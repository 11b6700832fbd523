"""The door for what comes after training: ``python -m ml_pipeline evaluate | compare``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ml_pipeline.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends with one line and exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ml_pipeline", description="Look at what train_ppo.py has trained."
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
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
