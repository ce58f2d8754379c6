"""Whether processes of a run grow: memory, descriptors and threads of each, looked at in the same phase of a step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.call_states import ACTORS as ACTOR_OF
from pipeline.step.operations import Op
from support.kills import Run, title
from support.traps import ACTORS

MIB = 1 << 20
KINDS = {kind: name for name, kind in ACTORS.items()}
OPERATIONS = {str(op): "optimizer-0" if actor == "optimizer" else actor for op, actor in ACTOR_OF.items()}
BOUNDS = {"log_monitor": 240}
"""Descriptors that a process may hold whatever it held before: Ray's reader of logs closes those of ended processes
only when it has 200 open."""
LOOKS = 9
"""At least, for medians of three thirds to mean something."""


class Look(NamedTuple):
    """What a process holds."""

    private_bytes: int
    """Memory of its own: neither the arena nor mapped files, of which the share depends on who else has them mapped."""
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Limits:
    """The most that the median of the last third of the looks may exceed that of the second; the first is warm-up."""

    private_bytes: int
    descriptors: int = 0
    threads: int = 0


class Growth:
    """Looks at all processes of one run, by what they are."""

    def __init__(self) -> None:
        self.looks: dict[str, list[Look]] = defaultdict(list)

    def look(self, run: Run) -> None:
        """Look now."""
        for name, process in processes(run):
            with suppress(psutil.Error, OSError), process.oneshot():
                status = Path(f"/proc/{process.pid}/status").read_text()
                private_bytes = int(status.partition("RssAnon:")[2].split()[0]) << 10
                look = Look(private_bytes, process.memory_info().rss, process.num_fds(), process.num_threads())
                self.looks[name].append(look)

    def check(self, limits: Limits) -> None:
        """Fail naming the process that grew."""
        for name, looks in self.looks.items():
            if len(looks) < LOOKS:
                continue
            before, after = _thirds(looks)
            text = f"{name} grew from {before} to {after} in {len(looks)} looks: {looks}"
            assert after.private_bytes <= before.private_bytes + limits.private_bytes, text
            assert after.descriptors <= max(before.descriptors + limits.descriptors, BOUNDS.get(name, 0)), text
            assert after.threads <= before.threads + limits.threads, text

    def __str__(self) -> str:
        lines = []
        for name, looks in sorted(self.looks.items()):
            if len(looks) < LOOKS:
                continue
            before, after = _thirds(looks)
            lines.append(
                f"  {name}: {before.private_bytes / MIB:.1f} -> {after.private_bytes / MIB:.1f} MiB of its own, "
                f"{before.resident_bytes / MIB:.1f} -> {after.resident_bytes / MIB:.1f} resident, "
                f"{before.descriptors} -> {after.descriptors} descriptors, {before.threads} -> {after.threads} threads "
                f"({len(looks)} looks)"
            )
        return "\n".join(lines)


def processes(run: Run) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of a run with what it is: driver, actors by name, Ray's own by theirs."""
    driver = psutil.Process(run.process.pid)
    yield "driver", driver
    for process in driver.children(recursive=True):
        shown = title(process.pid)
        if not shown.startswith("ray::"):
            with suppress(psutil.Error):
                script = next((Path(part).stem for part in process.cmdline() if part.endswith(".py")), "")
                yield script or process.name(), process
            continue
        work = shown.removeprefix("ray::")
        name = KINDS.get(work.split(".")[0]) or OPERATIONS.get(work.removeprefix("re").split("[")[0])
        yield name or OPERATIONS.get(work.split("[")[0]) or shown, process


def leftovers(before: set[str]) -> list[str]:
    """Files in /dev/shm that were not there before and that no process has open any more."""
    new = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()} - before
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            new -= {mapping.path for mapping in process.memory_maps()}
            new -= {file.path for file in process.open_files()}
    return sorted(new)


def _thirds(looks: list[Look]) -> tuple[Look, Look]:
    third = len(looks) // 3
    second, last = looks[-2 * third : -third], looks[-third:]
    return _median(second), _median(last)


def _median(looks: list[Look]) -> Look:
    return Look(*(int(statistics.median(values)) for values in zip(*looks, strict=True)))


assert {op.value for op in Op} <= OPERATIONS.keys()
