"""paper: walk new bars with a deployed policy, and log its orders, positions and equity."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ml_pipeline.commands._arguments import add_shared
from ml_pipeline.metrics import counted
from ml_pipeline.worlds.trading.commands._files import add_format, given_format

if TYPE_CHECKING:
    from ml_pipeline.worlds.trading.paper import Walked

HELP = "trade on paper: walk new bars of market files with an exported policy"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "policy", type=Path, metavar="POLICY", help="file that export wrote, or a deployed folder"
    )
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="market files: a file, a folder or a pattern"
    )
    parser.add_argument(
        "--log", type=Path, metavar="DIR", help="default: paper/NAME, the name of the run"
    )
    parser.add_argument(
        "--follow", action="store_true", help="wait for more bars; default: stop after the last one"
    )
    parser.add_argument(
        "--start",
        type=_time,
        metavar="DATE",
        help="walk bars that end after it, in UTC; default: bars newer than the training data",
    )
    add_format(parser, zone="as in training", label="as in training")
    add_shared(parser, "--trust")


def run(options: Namespace) -> None:
    import hashlib

    import torch

    from ml_pipeline.deploy.exported import ExportedPolicy
    from ml_pipeline.device import torch_threads
    from ml_pipeline.foreign import read_regular
    from ml_pipeline.runs.console import say
    from ml_pipeline.signals import StopSignals
    from ml_pipeline.worlds.trading.data.bars import text_of
    from ml_pipeline.worlds.trading.data.files import market_files
    from ml_pipeline.worlds.trading.paper import LOG_FORMAT, PaperPolicy, PaperWalk
    from ml_pipeline.worlds.trading.paper_log import PaperError, PaperLog

    path = options.policy / "policy.pt2" if options.policy.is_dir() else options.policy
    exported = ExportedPolicy.load(path, trust=options.trust)
    policy = PaperPolicy(exported, path)
    header = {
        "format": LOG_FORMAT,
        "policy": hashlib.sha256(read_regular(path)).hexdigest(),
        "symbols": policy.recipe.symbols,
        "start": None if options.start is None else text_of(options.start),
    }
    # A deployed policy is in a hidden folder, to which a link leads.
    folder = options.log or Path("paper") / Path(exported.metadata["run"]).name.lstrip(".")
    market_files(options.data)  # a wrong path must not leave a log behind
    with PaperLog.opened(folder, header) as log, torch_threads(torch.device("cpu")):
        walk = PaperWalk(policy, options.data, log, start=options.start, **given_format(options))
        say(f"{exported.env_name}, {', '.join(policy.recipe.symbols[:5])}: {log.path}")
        if options.start is not None and options.start < policy.until:
            until = text_of(policy.until)
            say(f"note: bars until {until} served to train or select this policy; they are no test")
        if log.last is not None:
            say(f"continues after {log.last['time']}")
        try:
            with StopSignals():
                for walked in walk.follow() if options.follow else walk.walk():
                    say(_line(walked))
        except KeyboardInterrupt:
            say("stopped; nothing is lost, and the same command continues")
            raise
        if log.last is None:
            raise PaperError(walk.why_nothing())
        if walk.is_closed:
            say(f"a margin call or stop has closed every account; last bar {log.last['time']}")


def _line(walked: Walked) -> str:
    """The bars since the last line, as text: the last bar, trades, equity and positions."""
    accounts = walked.record["accounts"].values()
    equity = sum(each["equity"] for each in accounts)
    orders = {
        symbol: exposure
        for each in accounts
        for symbol, exposure in (each["order"] or {}).items()
        if exposure != 0.0
    }
    wanted = ", ".join(f"{symbol} {exposure:+.2f}" for symbol, exposure in orders.items())
    return (
        f"{walked.record['time']}  {counted(walked.n_bars, 'bar')}, "
        f"{counted(walked.n_fills, 'trade')}, equity {equity:,.2f}, "
        f"next exposure {wanted or 'none'}"
    )


def _time(text: str) -> int:
    """An argparse type: a date or a time as UTC nanoseconds."""
    import numpy as np

    try:
        return int(np.datetime64(text.replace(" ", "T"), "ns").astype(np.int64))
    except ValueError as error:
        raise ArgumentTypeError(f"must be a date such as 2024-01-31, got {text}") from error
