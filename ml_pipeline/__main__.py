"""``python -m ml_pipeline COMMAND``, and ``ml-pipeline COMMAND`` of an installed package.

A command is a file in ``commands/``, or in that of a world or an algorithm: its name, ``HELP``,
``add_arguments`` and ``run``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ml_pipeline import __version__
from ml_pipeline.assembly.script import exit_code
from ml_pipeline.shelves import command_modules
from ml_pipeline.signals import StopSignals


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(
            r"argument (.+?): (?:invalid choice: '(.*?)' \(|expected one argument)", message
        )
        action = next((a for a in self._actions if wrong and wrong[1] in _names(a)), None)
        choices = [str(each) for each in (action.choices if action else None) or ()]
        if wrong and wrong[2] and (near := _nearest(wrong[2], choices)):
            message = f"{wrong[1]}: no {wrong[2]}; did you mean {near}?"
        elif wrong and not wrong[2] and choices:
            message += f", one of {', '.join(choices)}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Report words that no option of this command takes."""
        known = [name for action in self._actions for name in action.option_strings]
        name, has_value, value = words[0].partition("=")
        near = _nearest("--" + name.strip("-").replace("_", "-"), known)
        value = value if has_value else " ".join(words[1:2])
        hint = f"; did you mean {f'{near} {value}'.strip()}?" if near else ""
        self.error(f"unknown arguments: {' '.join(words)}{hint}")


def _names(action: argparse.Action) -> list[str]:
    return [*action.option_strings, str(action.metavar), "/".join(action.option_strings)]


def _nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that is misspelt, shortened, or lengthened as in --n-episodes."""
    bare = word.strip("-")
    parts = [each for each in known if each.strip("-").startswith(bare) and len(bare) > 2]
    parts += [each for each in known if bare.endswith("-" + each.strip("-"))]
    return next(iter([*parts, *get_close_matches(word, known, n=1)]), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown)
    with StopSignals():  # an env may swallow a plain KeyboardInterrupt
        options.command(options)


def _parser() -> _Parser:
    is_installed = Path(sys.argv[0]).stem == "ml-pipeline"
    parser = _Parser(
        prog="ml-pipeline" if is_installed else "python -m ml_pipeline",
        description="Train agents, look at what they learned, and use their policies.",
    )
    parser.add_argument("--version", action="version", version=f"ml_pipeline {__version__}")
    choices = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in sorted(command_modules().items()):
        command = import_module(module)
        command_parser = choices.add_parser(
            name.replace("_", "-"), help=command.HELP, description=command.HELP
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(command=command.run, parser=command_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
