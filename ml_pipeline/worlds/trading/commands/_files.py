"""What the commands that read market files ask about them."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from ml_pipeline.worlds.trading.config import COLUMNS, LABELS


def add_format(parser: ArgumentParser, *, zone: str, label: str) -> None:
    """The fields of a ``FileFormat``; ``zone`` and ``label`` describe the defaults."""
    parser.add_argument("--timezone", help=f"of times without a zone; default: {zone}")
    parser.add_argument("--label", choices=LABELS, help=f"times of a table; default: {label}")
    parser.add_argument(
        "--column",
        action="append",
        type=_column,
        metavar="OURS=NAME",
        help="the name of a column in a table, such as time=Timestamp; repeatable",
    )


def given_format(options: Namespace) -> dict[str, Any]:
    """The fields that were given."""
    columns = None if options.column is None else dict(options.column)
    fields = {"timezone": options.timezone, "label": options.label, "columns": columns}
    return {name: value for name, value in fields.items() if value is not None}


def _column(text: str) -> tuple[str, str]:
    """An argparse type."""
    ours, _, name = text.partition("=")
    if ours not in COLUMNS or not name:
        raise ArgumentTypeError(f"must be OURS=NAME with {' | '.join(COLUMNS)}, got {text}")
    return ours, name
