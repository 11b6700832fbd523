"""Arguments that several commands share; the underscore hides this file from the list."""

from __future__ import annotations

import os
import re
import sys
import webbrowser
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from ml_pipeline.config.train import RUN_ROOT
from ml_pipeline.errors import UserError

if TYPE_CHECKING:
    from ml_pipeline.assembly.players import Player

LATEST_RUN = "latest"
RUN_HELP = f"run folder, or {LATEST_RUN}: the run that was started or resumed last"
ENV_HELP = "play in this env: a file of conf/env, or a run whose env to use"
MOST_GAMES = 32  # played at the same time
_SHARED: dict[str, dict[str, Any]] = {  # arguments of add_argument
    "--checkpoint": {
        "metavar": "NAME",
        "help": "best, latest or step_N; default: best if saved, else latest",
    },
    "--deterministic": {
        "action": "store_true",
        "help": "take the most likely action; default: sample",
    },
    "--render": {"choices": ("human",), "help": "show the episodes in a window"},
    "--root": {
        "type": Path,
        "default": Path(RUN_ROOT),
        "metavar": "DIR",
        "help": f"find runs in this folder, the run_root of a config; default: {RUN_ROOT}",
    },
    "--trust": {
        "action": "store_true",
        "help": "accept files of another user that can run any code; default: refuse them",
    },
}


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer of at least ``least`` and at most ``most``."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise ArgumentTypeError(f"must be an integer {limits}, got {text}")
        return int(text)

    return parse


def add_shared(parser: ArgumentParser, *names: str) -> None:
    """Add options that mean the same in several commands."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_results(parser: ArgumentParser, default: str) -> None:
    """For commands that write files and a page, for ``show_results``."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder of the results; default: runs/{default}_<date>_<time>",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def prepare_window(render: str | None) -> None:
    """Say if a window would be invisible; call it before the env is made."""
    if render is None:
        return
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # with its own, pygame ignores SIGTERM
    displays = "DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"
    if sys.platform.startswith("linux") and not any(map(os.environ.get, displays)):
        print(
            "--render human: there is no display (DISPLAY is not set), so a window is invisible; "
            "python -m ml_pipeline evaluate RUN --video writes files instead",
            file=sys.stderr,
        )


def chosen_run(given: str, root: Path) -> str:
    """The path of a run; prints it for ``latest``, unless a file or folder has that name."""
    from ml_pipeline.analysis.listing import newest_run

    if given != LATEST_RUN or Path(given).exists():
        return given
    path = str(newest_run(root).path)
    print(f"{LATEST_RUN}: {path}")
    return path


def check_actions(player: Player, *, deterministic: bool) -> None:
    """Refuse an exported policy where actions are sampled."""
    if player.only_greedy and not deterministic:
        raise UserError(f"{player.name}: an exported policy acts greedily; add --deterministic")


def dated_folder(kind: str, name: str) -> Path:
    """The default folder of a result: runs/<kind>/<name>_<date>_<time>."""
    safe = re.sub(r"[^\w.-]+", "-", name)
    return Path("runs") / kind / f"{safe}_{datetime.now():%Y-%m-%d_%H-%M-%S}"


def print_fitted(make_columns: Callable[[int], tuple[dict[str, list[str]], list[str]]]) -> None:
    """Print a table that fits the width of the console, and name the columns that did not fit.

    The table is wide if the output is a pipe.
    """
    from ml_pipeline.analysis.settings import table_lines

    columns, hidden = make_columns(get_terminal_size().columns if sys.stdout.isatty() else 250)
    print("\n".join(table_lines(columns)))
    if hidden:
        print(f"not shown, for lack of width: {', '.join(hidden)}")


def show_results(folder: Path, write: Callable[[Path], Path], *, opens: bool) -> None:
    """Write the report of results that are already in ``folder``, if its packages are there."""
    if not show_report(lambda: write(folder), is_asked_for=False, opens=opens):
        print(f"results: {folder}")


def show_report(write: Callable[[], Path], *, is_asked_for: bool, opens: bool) -> bool:
    """Write a report, print its path and open it in a browser; returns whether it was written.

    Without the packages for it, print how to install them, or raise if it ``is_asked_for``.
    """
    from ml_pipeline.extras import MissingExtraError

    try:
        page = write()
    except MissingExtraError as error:
        if is_asked_for or opens:
            raise
        print(error)
        return False
    print(f"report: {page}")
    if opens:
        webbrowser.open(page.resolve().as_uri())
    return True
