"""train: the command line of a train_*.py script, for the installed package."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

HELP = "train an agent; train --help lists all settings"


def add_arguments(parser: ArgumentParser) -> None:
    # Hydra parses the whole command line, so this parser must not treat any word as an option.
    parser.prefix_chars = "\0"
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE")


def run(options: Namespace) -> None:
    from ml_pipeline.assembly.entry import check_words, train
    from ml_pipeline.assembly.words import as_settings

    command_line = [f"{sys.argv[0]} train", *as_settings(options.arguments)]
    check_words(command_line)
    train(command_line)
