"""The raw file of a benchmark: every figure, with its command, commit, date, machine and versions.

``--json benchmarks/results/NAME.json`` of a benchmark writes it. Fill the file on a quiet machine:
``load`` is the mean number of busy programs during the minute before it was written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "numpy", "gymnasium", "envpool", "stable-baselines3", "fastapi", "wandb")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``; the path is absolute, because a benchmark may change its folder."""
    parser.add_argument(
        "--json", type=_absolute, metavar="FILE", help="write the raw figures to this file too"
    )


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def write_raw(path: Path | None, figures: Any) -> None:
    """Write the figures and where they come from, unless ``path`` is None."""
    if path is None:
        return
    # Late: ml_pipeline sets how long the threads of torch spin, which the peers shall not inherit.
    from ml_pipeline.envs.workers.cores import available_cores

    content = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _commit(),
        "date": str(date.today()),
        "machine": {
            "processor": _processor(),
            "cores": available_cores(),
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"saved {path}")


def _commit() -> str | None:
    """The commit of this clone, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _processor() -> str:
    """The model of the processor, as Linux names it; elsewhere the architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {names[0]}" if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an optional peer
            continue
    return found
