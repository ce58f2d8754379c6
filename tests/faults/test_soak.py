"""`make soak`: minutes of random kills in a run of many small steps; the same bits, and nothing grows.

MEGATRAIN_SOAK_S sets how long kills go on (default 600), MEGATRAIN_SOAK_SEED where the choices start.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.kills import Run, assert_same_state, running

SOAK_S = float(os.environ.get("MEGATRAIN_SOAK_S", "600"))
SEED = int(os.environ.get("MEGATRAIN_SOAK_SEED", "0"))
STEPS = max(200, int(2 * SOAK_S))
"""More than are reached between kills: the rest is trained when no more come."""
OPERATIONS = (
    *("stage", "forward", "head", "backward", "offload", "norm"),
    *("update", "load_state", "store_state", "snapshot", "evaluate", "ParameterTier"),
)
"""As Ray shows them; `begin` and `loss` take microseconds, too short to be seen from outside."""
OPTIONS = (f"train.steps={STEPS}", "optimizer.schedule=constant", "checkpoint.every_steps=10", "eval.every_steps=40")

pytestmark = [pytest.mark.ray, pytest.mark.skipif("MEGATRAIN_SOAK" not in os.environ, reason="make soak runs it")]


@pytest.mark.timeout(4 * SOAK_S + 1800)
def test_random_kills_end_in_the_same_bits_and_nothing_grows(recipe: Path) -> None:
    """Every actor at every operation by turns, now and then the driver or the raylet, which a new command follows."""
    choice, run_dir = random.Random(SEED), recipe.parent / "soak"
    deadline, tried, grown = time.monotonic() + SOAK_S, 0, Growth()
    while time.monotonic() < deadline:
        with running(recipe, run_dir, *OPTIONS) as run:
            run.wait_for(lambda: run.said(": done in ") > 0, "filled actors")
            for _ in range(choice.randint(2, 6)):
                filled, operation = run.said(": done in "), choice.choice(OPERATIONS)
                if run.step() > STEPS - 100 or time.monotonic() > deadline:
                    break
                grown.look(run)
                seen = run.kill_at(run.step() + choice.randint(0, 30), f"ray::{operation}")
                tried += 1
                run.wait_for(lambda filled=filled: run.said(": done in ") > filled, f"recovery from {seen}")  # type: ignore[misc]
            else:
                tried += 1
                if choice.random() < 0.5:
                    os.kill(run.process.pid, signal.SIGKILL)
                else:
                    next(p for p in psutil.Process(run.process.pid).children() if p.name() == "raylet").kill()
                run.finish()
                continue
            break
    with running(recipe, run_dir, *OPTIONS) as run:
        assert run.process.wait(3600) == 0, run.output()
    undisturbed = recipe.parent / "soak-undisturbed"
    with running(recipe, undisturbed, *OPTIONS) as run:
        assert run.process.wait(3600) == 0, run.output()
    last = f"checkpoints/step-{STEPS:06}"
    assert_same_state(run_dir / last, undisturbed / last)
    grown.check()
    sys.stdout.write(f"\nkills: tried {tried}, survived {tried}; {grown}\n")


class Growth:
    """Memory, descriptors and shared memory of drivers, looked at before every kill."""

    def __init__(self) -> None:
        self.looks: dict[int, list[tuple[int, int, int]]] = {}

    def look(self, run: Run) -> None:
        driver = psutil.Process(run.process.pid)
        shared = sum(path.stat().st_size for path in Path("/dev/shm").iterdir() if path.is_file())
        look = (driver.memory_info().rss, driver.num_fds(), shared)
        self.looks.setdefault(driver.pid, []).append(look)

    def check(self) -> None:
        for looks in self.looks.values():
            (first_rss, first_fds, first_shared), (last_rss, last_fds, last_shared) = looks[0], looks[-1]
            assert last_rss < first_rss + (150 << 20), f"the driver grew from {first_rss} to {last_rss} bytes"
            assert last_fds < first_fds + 40, f"the driver's descriptors went from {first_fds} to {last_fds}"
            assert last_shared <= first_shared + (64 << 20), f"/dev/shm went from {first_shared} to {last_shared} bytes"

    def __str__(self) -> str:
        spans = [(looks[0], looks[-1]) for looks in self.looks.values()]
        return "; ".join(
            f"driver {first[0] >> 20} -> {last[0] >> 20} MiB, {first[1]} -> {last[1]} descriptors"
            for first, last in spans
        )
