"""The processes of a run's actors, watched by the driver: which are gone, what they hold, what they are doing.

A death shows here at once also for an actor that nothing waits for. A process is held by a descriptor (pidfd), so that
a number the kernel hands out again is never taken for the actor.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from pipeline.errors import ActorLostError
from tiers.arena_users import ArenaIdentity
from tiers.quantities import shown_bytes, shown_duration


@dataclass
class _Watched:
    pid: int
    descriptor: int
    process: psutil.Process
    resident_bytes: int = 0
    """When last looked at; of a dead process all that is left to tell."""


class ActorProcesses:
    """Belongs to the crew, which closes it. Not thread-safe but for `describe`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Start to watch.

        Args:
            pids: Process of each actor, by the actor's name.

        Raises:
            ActorLostError: One is gone already.
        """
        self._driver = psutil.Process()
        self._watched: dict[str, _Watched] = {}
        self._raylet: _Watched | None = None
        for name, pid in pids.items():
            try:
                self._watch(name, pid)
            except (ProcessLookupError, psutil.Error) as error:
                self.close()
                raise ActorLostError(f"the actor {name} died while the actors were starting") from error
        self.private_bytes()
        self._raylet = self._watched_raylet()

    @classmethod
    def with_arena(cls, arena: ArenaIdentity) -> ActorProcesses:
        """Watch whoever has an arena mapped, also actors whose construction is at work."""
        found = cls({})
        for pid in arena.users():
            with suppress(OSError, psutil.Error):  # ended meanwhile
                found._watch(f"process {pid}", pid)
        return found

    def dead(self) -> tuple[str, ...]:
        """Names of the actors whose processes have ended."""
        return tuple(name for name, watched in self._watched.items() if _ended(watched, 0.0))

    def raylet_ended(self) -> bool:
        """Whether the Ray process that started the actors is gone: then no new ones can be started.

        Ray takes 15 to 30 s to notice, and its actors work on meanwhile.
        """
        return self._raylet is not None and _ended(self._raylet, 0.0)

    def private_bytes(self) -> int:
        """Resident memory of driver and actors that is not shared: the arena's pages are counted once, elsewhere."""
        total = _private_bytes(self._driver.memory_info())
        for watched in self._watched.values():
            try:
                memory = watched.process.memory_info()
            except psutil.Error:
                continue  # gone; who waits for it, or `dead`, tells
            if memory.rss:  # one that has just been killed holds nothing any more
                watched.resident_bytes = memory.rss
            total += _private_bytes(memory)
        return total

    def describe(self, name: str) -> str:
        """Process number, memory and state of an actor, in words."""
        watched = self._watched.get(name)
        if watched is None:
            return "process unknown"
        if _ended(watched, 0.0):
            return f"process {watched.pid}, ended; held {shown_bytes(watched.resident_bytes)} when last looked at"
        try:
            with watched.process.oneshot():
                memory, state = watched.process.memory_info().rss, watched.process.status()
                times = watched.process.cpu_times()
        except psutil.Error:
            return f"process {watched.pid}, just ended"
        cpu_s = times.user + times.system
        return f"process {watched.pid}, {state}, {shown_duration(cpu_s)} of CPU time, {shown_bytes(memory)} resident"

    def name_of(self, pid: int) -> str | None:
        """The actor that runs, or ran, in a process."""
        return next((name for name, watched in self._watched.items() if watched.pid == pid), None)

    def wait_until_ended(self, grace_s: float, timeout_s: float) -> tuple[str, ...]:
        """Wait until all have ended, for only then is their memory free again.

        Args:
            grace_s: What Ray's kill is given. It asks the process itself, which one that is stopped or stuck does not
                hear: what is left then is killed by the kernel.
            timeout_s: What the kernel is given after that.

        Returns:
            Names of those that are still there.
        """
        if remaining := self._not_ended(grace_s):
            for watched in remaining.values():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(watched.descriptor, signal.SIGKILL)
        return tuple(self._not_ended(timeout_s))

    def _not_ended(self, timeout_s: float) -> dict[str, _Watched]:
        deadline_s = time.monotonic() + timeout_s
        return {
            name: watched
            for name, watched in self._watched.items()
            if not _ended(watched, max(0.0, deadline_s - time.monotonic()))
        }

    def close(self) -> None:
        """Give up the descriptors."""
        for watched in (*self._watched.values(), *([self._raylet] if self._raylet else [])):
            os.close(watched.descriptor)
        self._watched.clear()
        self._raylet = None

    def _watch(self, name: str, pid: int) -> None:
        process = psutil.Process(pid)
        self._watched[name] = _Watched(pid, os.pidfd_open(pid), process)

    def _watched_raylet(self) -> _Watched | None:
        for watched in self._watched.values():
            with suppress(ProcessLookupError, psutil.Error):  # one that has just ended; `dead` tells
                parent = watched.process.parent()
                if parent is not None and parent.name() == "raylet":
                    return _Watched(parent.pid, os.pidfd_open(parent.pid), parent)
        return None


def _ended(watched: _Watched, timeout_s: float) -> bool:
    """A pidfd becomes readable when its process ends."""
    poll = select.poll()
    poll.register(watched.descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _private_bytes(memory: Any) -> int:
    return int(memory.rss - memory.shared)
