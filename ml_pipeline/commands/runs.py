"""runs: list runs, or remove some of them."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from ml_pipeline.commands._arguments import add_shared, print_fitted
from ml_pipeline.errors import UserError

HELP = "list runs, or remove some with: runs prune"

_ACTIONS = "list", "prune"
_STATUSES = ("running", "finished", "interrupted", "failed", "died", "unknown")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", type=_action, choices=_ACTIONS, default="list")
    add_shared(parser, "--root")
    parser.add_argument("--env", help="only runs of this env")
    parser.add_argument(
        "--status", action="append", choices=_STATUSES, help="only runs of this status; repeatable"
    )
    parser.add_argument("--yes", action="store_true", help="prune: remove; default: only show")


def _action(text: str) -> str:
    if text not in _ACTIONS:
        raise ArgumentTypeError(f"{text} is no action; for the runs of an env, write --env {text}")
    return text


def run(options: Namespace) -> None:
    from ml_pipeline.analysis.listing import find_runs, prune, runs_table

    if options.action == "prune" and options.status is None:
        raise UserError("prune needs a status, for example: --status failed --status died")
    runs = [
        info
        for info in find_runs(options.root)
        if info.status in (options.status or _STATUSES)
        and options.env in (None, info.summary.get("env"))
    ]
    if not runs:
        print(f"no such runs in {options.root}")
        return
    print_fitted(lambda width: runs_table(runs, width))
    if options.action == "prune" and not options.yes:
        print(f"nothing removed yet; add --yes to remove these {len(runs)} run folders")
    elif options.action == "prune":
        prune(runs)
        print(f"{len(runs)} runs removed")
