"""How busy this machine is: what a start that did not come up in time is explained by."""

from __future__ import annotations

import os
from pathlib import Path


def machine_load() -> str:
    """Load and free memory in words, e.g. `a load of 17.3 on 2 cores, 812 MiB of memory available`."""
    cores = len(os.sched_getaffinity(0))
    load = f"a load of {os.getloadavg()[0]:.1f} on {cores} core{'' if cores == 1 else 's'}"
    kibibytes = _available_kibibytes()
    return load if kibibytes is None else f"{load}, {kibibytes >> 10:,} MiB of memory available"


def _available_kibibytes() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0])
    return None
