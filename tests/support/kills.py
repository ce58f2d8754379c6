"""Runs `tasks.train` as a user does and kills its processes at chosen moments, from outside, without hooks in it.

Ray shows the call at work as the title of an actor's process (`ray::forward[3]`), and the actor's class between calls
(`ray::Compute`): reading /proc finds a process at an operation within a fraction of a millisecond.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.small_recipe import SMALL_MODEL

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
        return [worker for worker in found if _title(worker.pid).startswith("ray::")]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Look until `condition` holds; the run must not end before."""
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {GIVE_UP_S:.0f} s:\n{self.output()}"
            time.sleep(0.002)

    def kill_at(self, step: int, title: str, victim: str | None = None) -> str:
        """After `step`, kill the actor whose process shows a title that begins with `title`, or the actor `victim`.

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
                    seen = _title(worker.pid)
                    if seen.startswith(title):
                        os.kill(self._actor(victim) if victim else worker.pid, signal.SIGKILL)
                        return True
                time.sleep(0.0005)  # an operation of the small model takes some milliseconds
            return False

        self.wait_for(caught, f"{title} after step {step}")
        return seen

    def finish(self) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(GIVE_UP_S)

    def _actor(self, class_name: str) -> int:
        return next(worker.pid for worker in self.workers() if _title(worker.pid).startswith(f"ray::{class_name}"))


@contextmanager
def running(recipe: Path, run_dir: Path, *options: str, log: Path | None = None) -> Iterator[Run]:
    """Start a run; whatever is left of it at exit is killed."""
    log = log or run_dir.with_suffix(".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tasks.train", str(recipe), "--set", f"run.dir={run_dir}"]
    for option in options:
        command += ["--set", option]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment, start_new_session=True
        )
    try:
        yield Run(recipe, run_dir, log, process)
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            for child in (*children, process):
                child.kill()
            process.wait()


def shards(checkpoint: Path) -> dict[str, bytes]:
    """Every shard of a checkpoint: what must be equal bit by bit."""
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in sorted(checkpoint.glob("*/*/c/0"))}


def assert_same_state(found: Path, wanted: Path) -> None:
    """Fail naming the first shard that differs."""
    left, right = shards(found), shards(wanted)
    assert right and left.keys() == right.keys()
    differing = [name for name in right if left[name] != right[name]]
    assert not differing, f"{found}: {len(differing)} of {len(right)} shards differ from {wanted}: {differing[:4]}"


def rows(run_dir: Path, name: str = "metrics.jsonl") -> Sequence[dict[str, object]]:
    """Rows of a run's file."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""
