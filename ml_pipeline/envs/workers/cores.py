"""available_cores: how many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")

# The share of each job, set for jobs of a sweep that run at the same time.
CORES_VARIABLE = "ML_PIPELINE_CORES"


def available_cores() -> int:
    """The least of CPU affinity, container quota and ML_PIPELINE_CORES; at least 1.

    The ranks that torchrun has started on this machine share its cores.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    share = os.environ.get(CORES_VARIABLE, "")
    if share.isdecimal():
        cores = min(cores, int(share))
    available = math.ceil(min(cores, cgroup_cores(_CGROUPS, _OWN_CGROUP)))
    n_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, available // max(int(n_ranks), 1) if n_ranks.isdecimal() else available)


def cgroup_cores(root: Path, own: Path) -> float:
    """The CPU quota of this process's control groups, in cores; infinite if there is none."""
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
        # The quotas of all parent groups also apply. Inside a container the path may not exist;
        # then the container's own group is the root.
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
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or an unknown format
        return math.inf
