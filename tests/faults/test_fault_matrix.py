"""Kills of real processes end in the bits of an undisturbed run: of actors, the driver and Ray's raylet at operations
of a step, at files of a checkpoint, and of all of them with what the disk had not been told to keep.

A part here, of each kind something; all of it in `test_whole_matrix`, which `make soak` runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.chosen_homes import ROOMY
from support.durability import Journal, begin, put_back
from support.kills import EVERY, assert_same_run, running
from support.traps import POWER, Trap

TRAPS = (
    Trap("return_state", "compute", "amid"),
    Trap("update_on_device", "parameter-tier"),
    Trap("capture", "prefetcher", "amid"),
    Trap("start Compute", "optimizer-0"),
    Trap("open layer-0003/exp_avg/c/0", "prefetcher"),
)


def report(*, tried: int, survived: int) -> None:
    sys.stdout.write(f"\nkills: tried {tried}, survived {survived}\n")


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_killed_actor_is_named_and_replaced_and_the_bits_are_the_same(recipe: Path, undisturbed: Path) -> None:
    """B130, B131."""
    run_dir, survived = recipe.parent / "actors", 0
    with running(recipe, run_dir, "memory.ram_gib=1", inside=recipe.parent / "traps", homes=ROOMY) as run:
        for trap in TRAPS:
            run.survive(trap)
            survived += 1
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed)
    report(tried=len(TRAPS), survived=survived)


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_the_same_command_goes_on_after_the_power_the_raylet_or_the_driver_was_lost(
    recipe: Path, undisturbed: Path
) -> None:
    """B108. Before a checkpoint has its name, in a step, and while an old checkpoint is removed."""
    root, inside = recipe.parent / "disk", recipe.parent / "more-traps"
    root.mkdir()
    inside.mkdir()
    begin(root, inside)
    run_dir, log = root / "new" / "run", recipe.parent / "lost.log"
    with running(recipe, run_dir, log=log, inside=inside, durable=root) as run:
        run.spring(Trap("os.rename .partial", POWER, skip=2))
    assert (run_dir / "checkpoints" / f"step-{3 * EVERY:06}.partial" / "manifest.json").exists()
    Journal(root, inside).after_loss(recipe.parent / "found")
    put_back(root, recipe.parent / "found")
    with running(recipe, run_dir, log=log, inside=inside) as run:
        run.spring(Trap("forward", "raylet", "amid"))
        assert run.finish() == 1
        assert "train: failed: Ray's raylet died" in run.output()
        assert f"restoring step-{2 * EVERY:06}" in run.output()
    with running(recipe, run_dir, log=log, inside=inside) as run:
        run.spring(Trap("os.remove manifest.json", "driver"))
        assert run.finish() != 1
    with running(recipe, run_dir, log=log) as run:
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed)
    report(tried=3, survived=3)


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_death_beyond_the_limit_fails_the_run_with_the_actors_name(recipe: Path) -> None:
    run_dir, options = recipe.parent / "limit", ("run.max_recoveries=0", "optimizer.max_grad_norm=0")
    with running(recipe, run_dir, *options, inside=recipe.parent / "limit-traps") as run:
        run.spring(Trap("loss", "compute", "begin", skip=1))
        assert run.finish() == 1
        assert "train: failed: the actor compute died at loss" in run.output()
        assert "The same command goes on" in run.output()
