"""Runs `tasks.train` as a user does and kills its processes at chosen moments.

From outside, without anything in the run: Ray shows the call at work as the title of an actor's process
(`ray::forward[3]`), and the actor's class between calls (`ray::Compute`), so that reading /proc finds a process at an
operation within a fraction of a millisecond. From inside, at exact points: `support.traps`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from support.chosen_homes import HOMES, Homes
from support.durability import ROOT
from support.small_recipe import SMALL_MODEL
from support.traps import ACTORS, INSIDE, POWER, RUN_DIR, Trap
from tiers.checkpoint import newest_complete

REPOSITORY = Path(__file__).resolve().parents[2]
GIVE_UP_S = 240.0

STEPS = 16
EVERY = 4
"""Steps between checkpoints."""

RECIPE = f"""{SMALL_MODEL}[data]
path = "text"
eval_fraction = 0.2
[train]
steps = {STEPS}
sequence_length = 64
sequences_per_step = 8
micro_batch = 4
device = "cpu"
[optimizer]
lr = 1e-3
[precision]
mode = "fp32"
[memory]
ram_gib = 0.0022  # the state of the decoder layers does not fit: every kind of operation occurs
optimizer_actors = 1
[eval]
every_steps = 8
[checkpoint]
every_steps = {EVERY}
[run]
max_recoveries = 100
"""


@dataclass
class Run:
    """A run of a recipe in a process of its own; what it says goes to `log`."""

    recipe: Path
    run_dir: Path
    log: Path
    process: subprocess.Popen[bytes]
    inside: Path | None = None
    """Folder of its traps."""
    filled_before: int = 0
    """Times that earlier runs with the same log have filled actors."""

    def step(self) -> int:
        """Last finished step."""
        try:
            rows = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(rows[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def output(self) -> str:
        """What it said so far."""
        return self.log.read_text(errors="replace")

    def said(self, pattern: str) -> int:
        """How many lines match."""
        return len(re.findall(pattern, self.output(), re.MULTILINE))

    def workers(self) -> list[psutil.Process]:
        """Ray's worker processes of this run."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [worker for worker in found if title(worker.pid).startswith("ray::")]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Look until `condition` holds; the run must not end before."""
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {GIVE_UP_S:.0f} s:\n{self.output()}"
            time.sleep(0.002)

    def kill_at(self, step: int, shown: str, victim: str | None = None) -> str:
        """After `step`, kill the actor whose process shows a title that begins with `shown`, or the actor `victim`.

        Returns:
            The title that was seen.
        """
        seen = ""

        def caught() -> bool:
            nonlocal seen
            if self.step() < step:
                return False
            # Children are listed anew: after a recovery they are others.
            until = time.monotonic() + 1.0
            workers = self.workers()
            while time.monotonic() < until:
                for worker in workers:
                    seen = title(worker.pid)
                    if seen.startswith(shown):
                        os.kill(self._actor(victim) if victim else worker.pid, signal.SIGKILL)
                        return True
                time.sleep(0.0005)  # an operation of the small model takes some milliseconds
            return False

        self.wait_for(caught, f"{shown} after step {step}")
        return seen

    def spring(self, trap: Trap) -> None:
        """Set a trap and wait until it has killed; the whole run goes at once where its victim is POWER.

        A trap in what only new actors do makes the run lose one first.
        """
        assert self.inside is not None
        folder = self.inside
        if only_at_start := trap.point == "restore" or trap.point.startswith("start "):
            self.wait_for(lambda: self.said(": done in ") > self.filled_before, "filled actors")
        if trap.point == "restore":
            self.wait_for(lambda: newest_complete(self.run_dir)[0] is not None, "a checkpoint")
        trap.arm(folder, self.process.pid)
        if only_at_start:
            os.kill(int((folder / f"{ACTORS['compute']}.pid").read_text()), signal.SIGKILL)
        deadline = time.monotonic() + GIVE_UP_S
        while not Trap.sprung(folder):
            assert self.process.poll() is None, f"ended before {trap}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{trap} was not sprung within {GIVE_UP_S:.0f} s:\n{self.output()}"
            time.sleep(0.002)
        if trap.victim == POWER:
            self.lose_power()

    def survive(self, trap: Trap) -> None:
        """Set a trap for an actor and wait until others are in its and everyone's place."""
        told = f"^the actor ({trap.victim}|{ACTORS[trap.victim]}) died"
        named, recovered = self.said(told), self.said("^recovery ")
        only_at_start = trap.point == "restore" or trap.point.startswith("start ")
        self.spring(trap)
        filled = self.said(": done in ")
        self.wait_for(lambda: self.said(told) > named, f"news of {trap}")
        self.wait_for(lambda: self.said("^recovery ") == recovered + 1 + only_at_start, f"recovery from {trap}")
        self.wait_for(lambda: self.said(": done in ") > filled, f"new actors after {trap}")

    def lose_power(self) -> None:
        """End every process of the run at one moment."""
        driver = psutil.Process(self.process.pid)
        processes = [driver, *driver.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()

    def finish(self) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(GIVE_UP_S)

    def _actor(self, class_name: str) -> int:
        return next(worker.pid for worker in self.workers() if title(worker.pid).startswith(f"ray::{class_name}"))


@contextmanager
def running(
    recipe: Path,
    run_dir: Path,
    *options: str,
    log: Path | None = None,
    inside: Path | None = None,
    homes: Homes | None = None,
    durable: Path | None = None,
    unread: bool = False,
) -> Iterator[Run]:
    """Start a run; whatever is left of it at exit is killed.

    Args:
        recipe: Of the run.
        run_dir: Its directory.
        options: `section.key=value`.
        log: Receives what it says; default: beside the run directory.
        inside: Folder for traps, which makes them work.
        homes: Where layers live, instead of where they fit.
        durable: Directory of which fsyncs are journalled in `inside`.
        unread: Give it a standard output whose reader has gone; `log` receives what goes to standard error.
    """
    log = log or run_dir.with_suffix(".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tasks.train", str(recipe), "--set", f"run.dir={run_dir}"]
    if inside is not None or homes is not None:
        environment["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY / 'tests'}"
    if inside is not None:
        inside.mkdir(exist_ok=True)
        environment["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY / 'tests' / 'support' / 'inside'}"
        environment |= {INSIDE: str(inside), RUN_DIR: str(run_dir)}
    if homes is not None:
        command[2] = "support.placed_train"
        environment |= {HOMES: json.dumps(asdict(homes))}
    if durable is not None:
        environment |= {ROOT: str(durable)}
    for option in options:
        command += ["--set", option]
    earlier = log.read_text(errors="replace") if log.exists() else ""
    with log.open("ab") as output:
        said = _pipe_without_reader() if unread else output.fileno()
        process = subprocess.Popen(
            command, stdout=said, stderr=output, cwd=REPOSITORY, env=environment, start_new_session=True
        )
        if unread:
            os.close(said)
    run = Run(recipe, run_dir, log, process, inside, earlier.count(": done in "))
    try:
        yield run
    finally:
        if process.poll() is None:
            run.lose_power()


def _pipe_without_reader() -> int:
    readable, writable = os.pipe()
    os.close(readable)
    return writable


def shards(checkpoint: Path) -> dict[str, bytes]:
    """Every shard of a checkpoint: what must be equal bit by bit."""
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in sorted(checkpoint.glob("*/*/c/0"))}


def assert_same_state(found: Path, wanted: Path) -> None:
    """Fail naming the first shard that differs."""
    left, right = shards(found), shards(wanted)
    assert right and left.keys() == right.keys()
    differing = [name for name in right if left[name] != right[name]]
    assert not differing, f"{found}: {len(differing)} of {len(right)} shards differ from {wanted}: {differing[:4]}"


def assert_same_run(run_dir: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """The same weights and moments, and the same history: no step twice, none missing."""
    last = f"checkpoints/step-{steps:06}"
    assert_same_state(run_dir / last, undisturbed / last)
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        found = [(row["step"], row["loss"]) for row in rows(run_dir, name)]
        assert found == [(row["step"], row["loss"]) for row in rows(undisturbed, name)]
    assert not list((run_dir / "checkpoints").glob("*.partial"))


def rows(run_dir: Path, name: str = "metrics.jsonl") -> Sequence[dict[str, object]]:
    """Rows of a run's file."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def title(pid: int) -> str:
    """First word of a process's command line, which Ray rewrites in its workers."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""
