"""``python slurm_cleanup.py FOLDER`` ends a cluster of tests once its own standard input closes.

The input closes when the tests stop the cluster, and also when they are killed. Then all daemons
and jobs end, and FOLDER is removed. They are known by the variable SLURM_CONF, which is inherited.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def marked_processes(config: Path) -> list[int]:
    """All processes with this path in SLURM_CONF; zombies have no environment."""
    mark = f"SLURM_CONF={config}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended since
            if mark in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def end_all(config: Path) -> None:
    """Kill them until none is left: some start others meanwhile."""
    deadline = time.monotonic() + 20
    while pids := marked_processes(config):
        assert time.monotonic() < deadline, f"still running: {pids}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the tests and their whole group
    folder = Path(sys.argv[1])
    sys.stdin.read()
    end_all(folder / "slurm.conf")
    shutil.rmtree(folder)
