"""Kills of real processes end in the bits of an undisturbed run: actors, the driver, Ray's raylet, amid checkpoints.

Every victim and operation is chosen by a fixed seed; when exactly the kernel stops a process within it is not. `make
soak` goes through all of them; the tests here take one of each kind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import psutil
import pytest

from support.kills import EVERY, STEPS, Run, assert_same_state, rows, running

OPERATIONS = {
    "compute": ("stage", "forward", "head", "backward", "offload", "norm"),
    "prefetcher": ("load_state", "store_state", "snapshot"),
    "optimizer-0": ("update",),
    "parameter-tier": ("ParameterTier",),
}
"""What Ray shows as the title of each actor's process while it works; the parameter tier only lives."""


def final(run_dir: Path, steps: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step-{steps:06}"


def assert_same_run(run_dir: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """The same weights and moments, and the same history: no step twice, none missing."""
    assert_same_state(final(run_dir, steps), final(undisturbed, steps))
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        found = [(row["step"], row["loss"]) for row in rows(run_dir, name)]
        assert found == [(row["step"], row["loss"]) for row in rows(undisturbed, name)]
    assert not list((run_dir / "checkpoints").glob("*.partial"))


def report(*, tried: int, survived: int) -> None:
    sys.stdout.write(f"\nkills: tried {tried}, survived {survived}\n")


def kill_raylet(run: Run) -> None:
    raylet = next(p for p in psutil.Process(run.process.pid).children(recursive=True) if p.name() == "raylet")
    raylet.kill()


def partial_files(run_dir: Path) -> int:
    return sum(len(names) for path in (run_dir / "checkpoints").glob("*.partial") for _, _, names in os.walk(path))


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1])
def test_a_killed_actor_is_named_and_replaced_and_the_bits_are_the_same(
    recipe: Path, undisturbed: Path, seed: int
) -> None:
    """B130, B131."""
    choice = random.Random(seed)
    run_dir = recipe.parent / f"actors-{seed}"
    survived = 0
    with running(recipe, run_dir) as run:
        for number, (actor, operations) in enumerate(OPERATIONS.items()):
            run.wait_for(lambda filled=number + 1: run.said(": done in ") >= filled, "filled actors")  # type: ignore[misc]
            seen = run.kill_at(EVERY * number // 2 + 1, f"ray::{choice.choice(operations)}")
            died = rf"the actor {actor} died.*Host memory available"
            run.wait_for(lambda died=died: run.said(died) > 0, f"news of the death of {actor} in {seen}")  # type: ignore[misc]
            survived += 1
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed)
    assert run.said("^recovery ") == survived
    report(tried=len(OPERATIONS), survived=survived)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_same_command_goes_on_after_the_driver_or_the_raylet_was_killed(recipe: Path, undisturbed: Path) -> None:
    """B108: once while the files of a checkpoint are written."""
    run_dir = recipe.parent / "driver"
    with running(recipe, run_dir) as run:
        run.wait_for(lambda: run.step() >= EVERY and partial_files(run_dir) > 5, "a checkpoint at work")
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
    with running(recipe, run_dir) as run:
        run.wait_for(lambda: run.step() > EVERY, "steps")
        kill_raylet(run)
        assert run.finish() == 1
        assert "train: failed: Ray's raylet died" in run.output()
    with running(recipe, run_dir) as run:
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed)
    report(tried=2, survived=2)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_death_beyond_the_limit_fails_the_run_with_the_actors_name(recipe: Path) -> None:
    run_dir = recipe.parent / "limit"
    with running(recipe, run_dir, "run.max_recoveries=0") as run:
        run.kill_at(1, "ray::update")
        assert run.finish() == 1
        assert "train: failed: the actor optimizer-0 died at update[" in run.output()
        assert "The same command goes on" in run.output()
