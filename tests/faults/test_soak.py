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

from support.growth import MIB, Growth, Limits, leftovers
from support.kills import Run, assert_same_state, running

SOAK_S = float(os.environ.get("MEGATRAIN_SOAK_S", "600"))
SEED = int(os.environ.get("MEGATRAIN_SOAK_SEED", "0"))
STEPS = max(600, int(2 * SOAK_S))
"""More than are reached between kills: the rest is trained when no more come."""
OPERATIONS = (
    *("stage", "forward", "head", "backward", "offload", "norm"),
    *("update", "load_state", "store_state", "snapshot", "evaluate", "ParameterTier"),
)
"""As Ray shows them; `begin` and `loss` take microseconds, too short to be seen from outside."""
EVERY, EVERY_EVAL = 10, 20
OPTIONS = (
    *(f"train.steps={STEPS}", "optimizer.schedule=constant", "run.max_recoveries=100000"),
    *(f"checkpoint.every_steps={EVERY}", f"eval.every_steps={EVERY_EVAL}"),
)
PHASE = 5
"""Of each EVERY_EVAL steps, the one after which is looked: no checkpoint and no evaluation is at work."""

pytestmark = [pytest.mark.ray, pytest.mark.skipif("MEGATRAIN_SOAK" not in os.environ, reason="make soak runs it")]


@pytest.mark.timeout(6 * SOAK_S + 3600)
def test_random_kills_end_in_the_same_bits_and_nothing_grows(recipe: Path) -> None:
    """Every actor at every operation by turns, now and then the driver or the raylet, which a new command follows."""
    choice, run_dir = random.Random(SEED), recipe.parent / "soak"
    shared = {str(path) for path in Path("/dev/shm").rglob("*")}
    deadline, tried, through_kills = time.monotonic() + SOAK_S, 0, list[Growth]()
    while time.monotonic() < deadline:
        through_kills.append(Growth())
        with running(recipe, run_dir, *OPTIONS) as run:
            run.wait_for(lambda: run.said(": done in ") > 0, "filled actors")
            for _ in range(choice.randint(4, 30)):
                filled, operation = run.said(": done in "), choice.choice(OPERATIONS)
                if run.step() > STEPS - 200 or time.monotonic() > deadline:
                    break
                look_at_phase(run, through_kills[-1])
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
    undisturbed, in_steps = recipe.parent / "soak-undisturbed", Growth()
    with running(recipe, undisturbed, *OPTIONS) as run:
        while run.process.poll() is None and run.step() < STEPS - EVERY_EVAL:
            look_at_phase(run, in_steps)
        assert run.process.wait(3600) == 0, run.output()
    sys.stdout.write(f"\nkills: tried {tried}, survived {tried}; {STEPS} steps\nwithout kills:\n{in_steps}\n")
    for growth in through_kills:
        sys.stdout.write(f"through kills:\n{growth}\n")
    last = f"checkpoints/step-{STEPS:06}"
    assert_same_state(run_dir / last, undisturbed / last)
    # Ray keeps some 100 bytes a call in whoever makes and takes it; a step has 75 here, an evaluation 200.
    in_steps.check(Limits(private_bytes=STEPS // 3 * 100 * 300))
    for growth in through_kills:
        growth.check(Limits(private_bytes=16 * MIB, descriptors=2, threads=2))
    assert leftovers(shared) == []


def look_at_phase(run: Run, growth: Growth) -> None:
    """Wait for the step after which is looked, and look."""
    after = run.step()
    wanted = after + ((PHASE - after) % EVERY_EVAL or EVERY_EVAL)
    run.wait_for(lambda: run.step() >= wanted, f"step {wanted}")
    growth.look(run)
