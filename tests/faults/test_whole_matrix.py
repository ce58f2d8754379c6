"""`make soak`: every actor, the driver and Ray's raylet killed at every operation of a step, and the processes that
write checkpoints at every file of one; each time the bits of an undisturbed run. About half an hour."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pipeline.step.operations import Op
from support.chosen_homes import NARROW, ROOMY, Homes
from support.file_changes import changes
from support.kills import assert_same_run, running
from support.traps import ACTORS, OPERATIONS, Trap
from tiers.checkpoint import newest_complete

SEED = int(os.environ.get("MEGATRAIN_SOAK_SEED", "0"))
SHARE = os.environ.get("MEGATRAIN_SOAK_SHARE", "1/1")
"""`2/5`: the second of five parts of the kills."""
MOMENTS = ("begin", "amid", "end")
VICTIMS = (*ACTORS, "driver", "raylet")

METHODS = {"evaluate": "evaluate_head"}
"""Of the operations whose method has another name."""

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif("MEGATRAIN_SOAK" not in os.environ, reason="make soak runs it"),
]


def survive(
    recipe: Path, run_dir: Path, traps: Sequence[Trap], options: Iterable[str], homes: Homes | None, inside: Path
) -> None:
    """Run to the end through all traps, with the same command again after those that take driver or raylet."""
    number, parts = map(int, SHARE.split("/"))
    traps = traps[number - 1 :: parts]
    waiting, survived = list(traps), Counter[str]()
    while True:
        with running(recipe, run_dir, *options, inside=inside, homes=homes) as run:
            while waiting:
                trap = waiting.pop(0)
                if trap.victim in ACTORS:
                    run.survive(trap)
                    survived[trap.victim] += 1
                else:
                    run.spring(trap)
                    status = run.finish()
                    assert status == (1 if trap.victim == "raylet" else -signal.SIGKILL), (trap, run.output())
                    survived[trap.victim] += 1
                    break
            else:
                assert run.finish() == 0, run.output()
                break
    tried = Counter(trap.victim for trap in traps)
    assert survived == tried
    counts = ", ".join(f"{victim} {count}" for victim, count in survived.items())
    sys.stdout.write(f"\nkills: tried {tried.total()}, survived {survived.total()}: {counts}\n")


def finished(recipe: Path, run_dir: Path, options: Iterable[str], inside: Path | None = None) -> Path:
    with running(recipe, run_dir, *options, inside=inside) as run:
        assert run.finish() == 0, run.output()
    return run_dir


NARROW_ONLY = ("recompute", "store_sum", "fetch_sum")
UNCLIPPED_ONLY = ("loss",)


def traps_at(points: Iterable[str], chance: random.Random, most_skipped: int = 4) -> list[Trap]:
    """Everyone killed at each point, each time at another moment."""
    return [
        Trap(point, victim, chance.choice(MOMENTS), chance.randint(0, most_skipped))
        for point in points
        for victim in VICTIMS
    ]


def test_everyone_is_killed_at_every_operation(recipe: Path) -> None:
    """While actors start and are filled too."""
    steps, folder, chance = 400, recipe.parent, random.Random(SEED)
    options = (f"train.steps={steps}", "eval.every_steps=4", "run.max_recoveries=1000")
    undisturbed = finished(recipe, folder / "operations-undisturbed", options)
    points = [name for names in OPERATIONS.values() for name in names if name not in NARROW_ONLY + UNCLIPPED_ONLY]
    traps = traps_at(points, chance)
    traps += [Trap(f"start {kind}", victim, chance.choice(("begin", "end"))) for kind, victim in starts()]
    chance.shuffle(traps)
    run_dir, options = folder / "operations", (*options, "memory.ram_gib=1")
    survive(recipe, run_dir, traps, options, ROOMY, folder / "operations-traps")
    assert_same_run(run_dir, undisturbed, steps)


def test_everyone_is_killed_at_the_operations_of_a_step_in_waves(recipe: Path) -> None:
    steps, folder, chance = 60, recipe.parent, random.Random(SEED)
    options = (f"train.steps={steps}", "run.max_recoveries=1000")
    undisturbed = finished(recipe, folder / "waves-undisturbed", options)
    run_dir, options = folder / "waves", (*options, "memory.ram_gib=1")
    survive(recipe, run_dir, traps_at(NARROW_ONLY, chance), options, NARROW, folder / "waves-traps")
    assert_same_run(run_dir, undisturbed, steps)


def test_every_operation_is_among_those_tried() -> None:
    assert {METHODS.get(op, op) for op in Op} <= {name for names in OPERATIONS.values() for name in names}


def test_a_stop_asked_for_at_any_operation_saves_and_a_second_one_quits(recipe: Path) -> None:
    """Also while they measure the held-out data; while actors start or are filled it ends with nothing changed."""
    steps, folder, chance = 120, recipe.parent, random.Random(SEED)
    options = (f"train.steps={steps}", "eval.every_steps=4", "run.max_recoveries=1000")
    undisturbed = finished(recipe, folder / "stops-undisturbed", options)
    run_dir, inside, options = folder / "stops", folder / "stops-traps", (*options, "memory.ram_gib=1")
    before_a_step = ("start Compute", "restore")
    points = ("snapshot", "evaluate_head", "begin", "backward", "update_on_device", "store_state")
    for point in (*points[:2], *before_a_step, *points[2:]):
        early, (newest, _) = point in before_a_step, newest_complete(run_dir)
        with running(recipe, run_dir, *options, inside=inside, homes=ROOMY) as run:
            number = chance.choice((signal.SIGTERM, signal.SIGINT))
            # The first evaluation, of 27 batches, may be one that the run before owed, and come before any step.
            beyond = 40 if point in ("evaluate_head", "begin") else 0
            skip = beyond + (0 if early or point == "snapshot" else chance.randint(0, 2))
            Trap(point, "driver", "begin", skip, number).arm(inside, run.process.pid)
            assert run.finish() == (128 + number if early else 3), run.output()
            assert Trap.sprung(inside) and "Traceback" not in run.output()
            found, skipped = newest_complete(run_dir)
            assert found is not None and not skipped
            assert found == newest if early else found.name == f"step-{run.step():06}"
    with running(recipe, run_dir, *options, inside=inside, homes=ROOMY) as run:
        filled = run.filled_before
        run.wait_for(lambda: run.said(": done in ") > filled, "filled actors")
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):  # both before it goes on
            run.process.send_signal(number)
        assert run.finish() == 130, run.output()
    with running(recipe, run_dir, *options, inside=inside, homes=ROOMY) as run:
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed, steps)


def starts() -> list[tuple[str, str]]:
    """Which actor starts, and which of those there are by then is killed."""
    order = [(name, ACTORS[name]) for name in ("parameter-tier", "prefetcher", "optimizer-0", "compute")]
    found = [(kind, victim) for _, kind in order for victim in ("driver", "raylet")]
    return found + [(kind, name) for place, (_, kind) in enumerate(order) for name, _ in order[: place + 1]]


def test_everyone_is_killed_where_the_loss_decides(recipe: Path) -> None:
    steps, folder, chance = 60, recipe.parent, random.Random(SEED)
    options = (f"train.steps={steps}", "optimizer.max_grad_norm=0", "run.max_recoveries=1000")
    undisturbed = finished(recipe, folder / "loss-undisturbed", options)
    traps = traps_at((*UNCLIPPED_ONLY, "update"), chance, 0)
    survive(recipe, folder / "loss", traps, options, None, folder / "loss-traps")
    assert_same_run(folder / "loss", undisturbed, steps)


def test_whoever_writes_is_killed_at_every_file_of_a_checkpoint(recipe: Path) -> None:
    """B108. Of a model of one decoder layer, whose files are those of any other; old checkpoints are removed too."""
    steps, folder, chance = 240, recipe.parent, random.Random(SEED)
    options = (
        *(f"train.steps={steps}", "checkpoint.every_steps=2", "checkpoint.keep_last=1", "eval.every_steps=0"),
        *("model.config.num_hidden_layers=1", "memory.ram_gib=1", "run.max_recoveries=1000"),
    )
    undisturbed = finished(recipe, folder / "files-undisturbed", options, folder / "files-seen")
    found = changes(folder / "files-seen")
    written = [change for change in found if change.startswith("open ")]
    names = {change.removeprefix("open ").rpartition("/")[2] for change in written}
    assert names == {".preflight", "zarr.json", "0", "manifest.json.partial"}
    moved = [change for change in found if change.startswith(("os.remove ", "os.rename "))]
    assert {"os.rename manifest.json.partial", "os.rename .partial", "os.rename ", "os.remove manifest.json"} <= set(
        moved
    )
    others = [change for change in found if change not in {*written, *moved}]
    traps = [Trap(change, "prefetcher") for change in written if change.startswith("open layer")]
    traps += [Trap(change, "driver") for change in (*written, *moved, *chance.sample(others, 10))]
    traps += [Trap(change, "raylet") for change in chance.sample(found, 5)]
    survive(recipe, folder / "files", traps, options, Homes(state_on_nvme=(1,)), folder / "files-traps")
    assert_same_run(folder / "files", undisturbed, steps)
