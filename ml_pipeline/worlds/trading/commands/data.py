"""data: check market files, and print what is in them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ml_pipeline.metrics import counted
from ml_pipeline.worlds.trading.commands._files import add_format, given_format

HELP = "check market files and print their symbols, spans and gaps"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a file, a folder or a pattern")
    add_format(parser, zone="UTC", label="start")


def run(options: Namespace) -> None:
    import numpy as np

    from ml_pipeline.worlds.trading.data.bars import bar_text, text_of
    from ml_pipeline.worlds.trading.data.files import market_files, read_bars
    from ml_pipeline.worlds.trading.data.layouts import FileFormat

    files = market_files(options.path)
    symbols, length = read_bars(files, FileFormat(**given_format(options)))
    n_files = counted(len(files), "file")
    print(f"{options.path}: {n_files}, bars of {bar_text(length)}, times are the ends in UTC")
    width = max(len("symbol"), *map(len, symbols))
    print(f"{'symbol':<{width}}  {'bars':>11}  {'first':<19}  {'last':<19}  {'gaps':>7}  longest")
    for name, bars in symbols.items():
        step = np.diff(bars.time)
        print(
            f"{name:<{width}}  {len(bars.time):>11,}  {text_of(int(bars.time[0]))}  "
            f"{text_of(int(bars.time[-1]))}  {int((step > length).sum()):>7,}  "
            f"{bar_text(int(step.max()) - length)}"
        )
