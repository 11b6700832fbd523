"""``python -m ml_pipeline COMMAND``, and ``ml-pipeline COMMAND`` of an installed package.

A command is a file in ``commands/``, or in that of a world or an algorithm: its name, ``HELP``,
``add_arguments`` and ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ml_pipeline.assembly.script import exit_code
from ml_pipeline.shelves import command_modules
from ml_pipeline.signals import StopSignals


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    with StopSignals():  # an env may swallow a plain KeyboardInterrupt
        options.command(options)


def _parser() -> _Parser:
    is_installed = Path(sys.argv[0]).stem == "ml-pipeline"
    parser = _Parser(
        prog="ml-pipeline" if is_installed else "python -m ml_pipeline",
        description="Train agents, look at what they learned, and use their policies.",
    )
    choices = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in sorted(command_modules().items()):
        command = import_module(module)
        command_parser = choices.add_parser(
            name.replace("_", "-"), help=command.HELP, description=command.HELP
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
