"""Processes of one head, told from every other process of the machine, through Linux `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import HEAD_MARKER

_PROC = Path("/proc")
_POLL_S = 0.05
_KILLED_WITHIN_S = 10.0
"""A process that was killed is gone at once, but on a machine whose cores are all at work."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that no later process can be mistaken for: pids are reused, pid and start time together are not."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to the start of the process (field 22 of `/proc/<pid>/stat`)."""

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks

    def send(self, signum: signal.Signals) -> None:
        """Signal the process if it still is the one meant."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def processes_of(marker: str, known: Iterable[ProcessId] = ()) -> frozenset[ProcessId]:
    """All live processes that carry `marker` in their environment, those `known`, and the descendants of both.

    Descendants are needed beside the mark: Ray's workers write their title over their environment.
    """
    needle = f"{HEAD_MARKER}={marker}".encode()
    stats = {int(entry.name): _stat(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit()}
    alive = {pid: stat for pid, stat in stats.items() if stat is not None}
    found = {process.pid for process in known if process.alive}
    found |= {pid for pid in alive if needle in _environment(pid)}
    found.discard(os.getpid())
    children: dict[int, list[int]] = {}
    for pid, stat in alive.items():
        children.setdefault(stat.parent, []).append(pid)
    pending = list(found)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found and child != os.getpid():
                found.add(child)
                pending.append(child)
    return frozenset(ProcessId(pid, alive[pid].start_ticks) for pid in found if pid in alive)


def end(marker: str, known: Iterable[ProcessId], *, grace_s: float) -> frozenset[ProcessId]:
    """End all processes of a head: SIGTERM, then after `grace_s` SIGKILL. Returns those that outlived even that.

    The raylet goes first, with its workers, and the GCS last: each waits seconds for those it talks to when they go
    before it (measured with Ray 2.60: 0.1 s in this order, over 10 s all at once).
    """
    mine = processes_of(marker, known)
    raylet = {process for process in mine if _name(process) == "raylet"}
    gcs = {process for process in mine if _name(process) == "gcs_server"}
    for stage in (raylet, mine - raylet - gcs, gcs):
        for process in stage:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(process.alive for process in stage) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    # Look again instead of trusting the first list: something may have been started in between.
    deadline = time.monotonic() + _KILLED_WITHIN_S
    while (mine := processes_of(marker, mine)) and time.monotonic() < deadline:
        for process in mine:
            process.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    return mine


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    """Parent and start time of a process; None where it is gone or a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may hold blanks and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else _Stat(int(fields[1]), int(fields[19]))


def _name(process: ProcessId) -> str:
    """Name of the executable, cut at 15 bytes; empty where the process is gone."""
    try:
        return (_PROC / str(process.pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _environment(pid: int) -> list[bytes]:
    """Environment a process was started with; empty where it may not be read (it is another user's)."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
