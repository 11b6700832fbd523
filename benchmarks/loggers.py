"""Cost of loggers: the share of the training time spent in them.

    python benchmarks/loggers.py --loggers wandb tensorboard trackio --rounds 3

The benchmark runs the default job once per logger and round. It times every call of a logger,
including the histograms every 20,000 steps and the checkpoint at the end. W&B runs offline, where
it does the same work in this process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from typing import Any
from unittest.mock import patch

from raw_file import add_json_option, write_raw

from ml_pipeline.assembly import run as build
from ml_pipeline.assembly.build import build_loggers


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begin)

    return call


def share_of(name: str, overrides: list[str]) -> float:
    """Seconds in the logger divided by seconds of training."""
    spent: list[float] = []

    def timed_loggers(*args: Any) -> dict[str, Any]:
        loggers = build_loggers(*args)
        for logger in loggers.values():
            for method in ("log", "log_histograms", "log_file"):
                if hasattr(logger, method):
                    setattr(logger, method, timed(getattr(logger, method), spent))
        return loggers

    begin = time.perf_counter()
    with patch.object(build, "build_loggers", timed_loggers), redirect_stdout(StringIO()):
        build.train([f"logger={name}", "device=cpu", "vec_env=serial", *overrides])
    return sum(spent) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loggers", nargs="+", default=["wandb", "tensorboard", "trackio"])
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    args = parser.parse_args()
    os.chdir(tempfile.mkdtemp())
    os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("TRACKIO_DIR", os.path.join(os.getcwd(), "trackio"))
    shares: dict[str, list[float]] = {name: [] for name in args.loggers}
    for _ in range(args.rounds):
        for name in args.loggers:
            shares[name].append(share_of(name, []))
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores")
    print("| logger | share of training time | range |")
    print("|---|---|---|")
    for name, found in shares.items():
        low, high = min(found), max(found)
        print(f"| {name} | {statistics.median(found):.2%} | {low:.2%} - {high:.2%} |")
    write_raw(args.json, shares)


if __name__ == "__main__":
    main()
