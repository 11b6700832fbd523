"""How many cores this process may really use: what is allowed to it, and what is paid for."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


# Set for the jobs of a sweep that run side by side: their share.
CORES_VARIABLE = "ML_PIPELINE_CORES"


def available_cores() -> int:
    """At least 1; what affinity, the quota of a container, and ML_PIPELINE_CORES all allow."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    share = os.environ.get(CORES_VARIABLE, "")
    if share.isdecimal():
        cores = min(cores, int(share))
    return max(1, math.ceil(min(cores, cgroup_cores(_CGROUPS, _OWN_CGROUP))))


def cgroup_cores(root: Path, own: Path) -> float:
    """The CPU quota of this process's control groups, in cores; infinite where there is none."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder = root
        elif "cpu" in controllers.split(","):
            folder = root / "cpu"
        else:
            continue
        # A group is held to the quotas of all groups above it. Inside a container the path may
        # not exist, and the container's own group is the root.
        below = folder / path.lstrip("/")
        quotas += [_quota(each) for each in (below, *below.parents) if each.is_relative_to(folder)]
    return min(quotas)


def _quota(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or none that we know
        return math.inf
