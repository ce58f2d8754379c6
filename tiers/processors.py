"""How many processors this process may use: the machine's, less what an affinity or a quota keeps from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiers.control_groups import CGROUPS, PROC, ControlGroup, control_groups


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processors that threads of this process may fill, at least 1.

    `os.cpu_count` has those of the machine: where a batch system, a container or taskset gives a process some of them,
    as many threads as the machine has cores take turns on those.

    Args:
        proc: Root of procfs.
        cgroups: Root of the mounted control groups, version 1, 2 or hybrid.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(proc, cgroups)]))


def _quotas(proc: Path, cgroups: Path) -> Iterator[int]:
    """Processor time that each group above this process may take at once, in processors, rounded up."""
    for group in control_groups("cpu", proc, cgroups):
        quota_us, period_us = _quota(group)
        if quota_us > 0 and period_us > 0:
            yield -(-quota_us // period_us)


def _quota(group: ControlGroup) -> tuple[int, int]:
    """Microseconds that a group may run in each period; 0 where it has no quota."""
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    files = [group.directory / name for name in names]
    if not all(file.exists() for file in files):
        return 0, 0
    quota, period = " ".join(file.read_text() for file in files).split()
    # Without a limit version 2 says `max`, version 1 -1.
    return 0 if quota == "max" else int(quota), int(period)
