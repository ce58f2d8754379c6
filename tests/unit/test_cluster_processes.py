"""Processes of a head are found by mark and descent, and nothing else is ever signalled."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.environment import HEAD_MARKER
from cluster.processes import ProcessId, end, processes_of

# Prints a line when it is ready, starts a child without the mark, and ignores SIGTERM if asked to.
PROGRAM = """
import os, signal, subprocess, sys
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], env={}, stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def running(marker: str | None, *arguments: str) -> Iterator[tuple[int, int]]:
    """Pids of a process and of its child, which does not carry the mark."""
    environ = {name: value for name, value in os.environ.items() if name != HEAD_MARKER}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environ | ({HEAD_MARKER: marker} if marker else {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = sorted(int(process.stdout.readline()) for _ in range(2))
    try:
        yield process.pid, lines[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ends_marked_processes_and_their_unmarked_children_only() -> None:
    mine, other = secrets.token_hex(8), secrets.token_hex(8)
    with running(mine) as (parent, child), running(other) as bystander, running(None) as unmarked:
        assert {process.pid for process in processes_of(mine)} == {parent, child}
        assert end(mine, (), grace_s=5.0) == frozenset()
        assert processes_of(mine) == frozenset()
        assert {process.pid for process in processes_of(other)} == set(bystander)
        assert all(os.path.exists(f"/proc/{pid}") for pid in unmarked)  # noqa: PTH110 - a pid, not a path


def test_what_ignores_sigterm_is_killed() -> None:
    marker = secrets.token_hex(8)
    with running(marker, "stubborn") as (parent, _):
        assert parent in {process.pid for process in processes_of(marker)}
        assert end(marker, (), grace_s=0.2) == frozenset()


def test_a_reused_pid_is_another_process() -> None:
    with running(None) as (pid, _):
        (start,) = {process.start_ticks for process in processes_of("none", [_identity(pid)]) if process.pid == pid}
        assert ProcessId(pid, start).alive
        assert not ProcessId(pid, start - 1).alive
        assert processes_of("none", [ProcessId(pid, start - 1)]) == frozenset()


def _identity(pid: int) -> ProcessId:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return ProcessId(pid, int(file.read().rsplit(")", 1)[1].split()[19]))
