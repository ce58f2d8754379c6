"""How much host memory this process may still take: what the machine has and what its control groups allow.

Called before anything large is allocated, so that shortage is a message and never a SIGBUS or a kill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiers.control_groups import CGROUPS, PROC, control_groups
from tiers.errors import HostMemoryError
from tiers.quantities import shown_bytes

GIB = 2**30

RESERVE_BYTES = GIB
"""Left to the rest of the machine, but never more than a sixteenth of what is available (small containers)."""

POLL_S = 0.1
"""Between two looks at memory that is coming free, some 10 GiB a second."""

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""`always within_size advise [never] deny force`: the setting in brackets."""


class Headroom(NamedTuple):
    """Memory that one limit still leaves."""

    available_bytes: int
    limit: str
    """Which limit: `MemAvailable of this machine` or a control group's file."""


def host_headroom(proc: Path = PROC, cgroups: Path = CGROUPS) -> Headroom:
    """Return the tightest of MemAvailable and every cgroup limit above this process.

    Args:
        proc: Root of procfs.
        cgroups: Root of the mounted control groups, version 1, 2 or hybrid.
    """
    available_kib = _fields(proc / "meminfo")["MemAvailable:"]
    machine = Headroom(available_kib * 1024, "MemAvailable of this machine")
    return min([machine, *_cgroup_headrooms(proc, cgroups)])


def available_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of host memory that this process may still take."""
    return host_headroom(proc, cgroups).available_bytes


def shared_memory_has_huge_pages(setting: Path = SHMEM_HUGE_PAGES) -> bool:
    """Whether shared memory that asks for huge pages gets them. A kernel without such a setting has none to give.

    A drive takes a request in pieces of memory that lie side by side: 16 MiB of scattered 4 KiB pages are 4096 of them.
    On a virtio drive O_DIRECT moved 1.2 to 3.4 GB/s with pages and 3.7 with huge pages, for an eighth of the CPU time.
    """
    words = setting.read_text().split() if setting.exists() else []
    return any(word in ("[always]", "[within_size]", "[advise]", "[force]") for word in words)


def require_host_memory(
    num_bytes: int,
    limit_bytes: int | None = None,
    *,
    wait_s: float = 0.0,
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
) -> None:
    """Refuse an arena of `num_bytes` that this machine, its control groups or the recipe have no room for.

    Args:
        num_bytes: Bytes that are about to be allocated.
        limit_bytes: The recipe's `[memory] ram_gib` in bytes, None where it sets no limit.
        wait_s: How long to wait for what ending processes still hold.
        proc: Root of procfs.
        cgroups: Root of the mounted control groups.

    Raises:
        HostMemoryError: The request passes a limit. Nothing has been allocated.
    """
    advice = "set [memory] nvme_dir to move layers to NVMe, or train a smaller model"
    if limit_bytes is not None and num_bytes > limit_bytes:
        raise HostMemoryError(
            f"the arena needs {shown_bytes(num_bytes)} of host memory, [memory] ram_gib allows "
            f"{shown_bytes(limit_bytes)}; raise ram_gib, {advice}"
        )
    deadline_s = time.monotonic() + wait_s
    while True:
        available, limit = host_headroom(proc, cgroups)
        reserve = min(RESERVE_BYTES, max(available, 0) // 16)
        if num_bytes <= available - reserve:
            return
        if time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            continue
        raise HostMemoryError(
            f"the arena needs {shown_bytes(num_bytes)} of host memory, {shown_bytes(available)} are available "
            f"({shown_bytes(reserve)} of them reserved) by {limit}; lower [memory] ram_gib, free memory or raise that "
            f"limit, {advice}"
        )


def _cgroup_headrooms(proc: Path, cgroups: Path) -> Iterator[Headroom]:
    for group in control_groups("memory", proc, cgroups):
        limit_name, usage_name, prefix = _FILES[group.version]
        headroom = _group_headroom(group.directory, limit_name, usage_name, prefix)
        if headroom is not None:
            yield headroom


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version of control groups: names of limit and usage, and what fields of its statistics begin with."""


def _group_headroom(group: Path, limit_name: str, usage_name: str, prefix: str) -> Headroom | None:
    limit_file = group / limit_name
    if not limit_file.exists() or (limit := limit_file.read_text().strip()) == "max":
        return None
    usage = int((group / usage_name).read_text())
    # Usage counts the page cache, which the kernel gives back before it kills: after reading a large model it would
    # otherwise look as if nothing were left.
    stat = group / "memory.stat"
    fields = _fields(stat) if stat.exists() else {}
    cache = sum(fields.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return Headroom(int(limit) - usage + cache, f"the cgroup limit {limit_file}")


def _fields(path: Path) -> dict[str, int]:
    """Read lines of `name value [unit]`."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) >= 2}
