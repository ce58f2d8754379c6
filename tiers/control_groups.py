"""The control groups above this process, where they are mounted: of version 1, 2 or both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """A group that this process is in, itself or by a group below it."""

    directory: Path
    """May be absent, or without files of a controller that is not on there."""
    version: int
    """1 or 2: their files have other names."""


def control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[ControlGroup]:
    """Every group whose limit of `controller` binds this process, from its own up to the root.

    Args:
        controller: Such as `memory` or `cpu`.
        proc: Root of procfs.
        cgroups: Root of the mounted control groups, version 1, 2 or hybrid.
    """
    membership = proc / "self" / "cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = cgroups, 2
        elif controller in controllers.split(","):
            base, version = cgroups / controller, 1
        else:
            continue
        # In a container the path may name groups of the host that are not mounted here; those directories are absent
        # (or lie above the root, as `/../..`), and the container's own group is the mounted root.
        parts = [] if ".." in path else [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield ControlGroup(base.joinpath(*parts[:depth]), version)
