"""After a loss of power a run directory holds what was fsynced, and maybe more: there is always a whole checkpoint in
it, never an older one than was there before, and a run goes on from it to the same bits."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.durability import Journal, Recorder, begin, put_back
from support.file_changes import changes
from support.kills import assert_same_run, running
from support.stores import random_arrays, saved_facts, small_model, write_layer
from support.traps import POWER, Trap
from tasks.memory_account import MemoryAccount
from tasks.run_directory import RunDirectory
from tiers import checkpoint
from tiers.checkpoint import newest_complete, prune
from tiers.direct_io import DirectIO
from tiers.layout import Precision
from tiers.manifest import verify
from tiers.preflight import preflight
from tiers.shard_store import ShardStore

MODEL = small_model(Precision.BF16, rows=200)
SEED = int(os.environ.get("MEGATRAIN_SOAK_SEED", "0"))


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory where fsync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def save(run_dir: Path, step: int) -> None:
    with DirectIO(requests=2) as io:
        writer = checkpoint.begin(run_dir, step, MODEL)
        store = ShardStore(writer.directory, MODEL, io, preflight(writer.directory))
        records = [
            record for layer in MODEL.layers for record in write_layer(store, layer, random_arrays(MODEL, layer, step))
        ]
        writer.publish(records, saved_facts(MODEL, step))
    prune(run_dir, keep_last=1)


def newest(tree: Path, known: int = 0) -> int:
    """Step of the checkpoint that a run would go on from; 0 for none. It must be whole, unless it is known to be."""
    path, _ = newest_complete(tree / "new" / "run")
    step = int(path.name.removeprefix("step-")) if path is not None else 0
    assert path is None or step == known or verify(path, deep=True, threads=1) == []
    return step


def test_what_is_found_after_any_fsync_goes_on_from_no_older_checkpoint(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journalled, found = (memory_path / name for name in ("disk", "journal", "found"))
    root.mkdir()
    journalled.mkdir()
    begin(root, journalled)
    recorder, sync, chance = Recorder(root, journalled), os.fsync, random.Random(SEED)
    monkeypatch.setattr(os, "fsync", lambda descriptor: recorder.synced(sync, descriptor))
    lengths = []
    with RunDirectory(root / "new" / "run") as directory:
        directory.keep("a recipe", MemoryAccount("llama", MODEL.num_parameters, ()))
        for step in (10, 20, 30):
            save(root / "new" / "run", step)
            journal = Journal(root, journalled)
            lengths.append(len(journal.entries))
            for _ in range(10):
                journal.after_chance(root, found, chance)
                assert newest(found) == step
                shutil.rmtree(found)
    monkeypatch.undo()
    steps = [0]
    for length in range(1, len(journal.entries) + 1):
        journal.after_loss(found, length)
        steps.append(newest(found, known=steps[-1]))
        shutil.rmtree(found)
    recorder.close()
    assert steps == sorted(steps) and set(steps) == {0, 10, 20, 30}
    assert [steps[length] for length in lengths] == [10, 20, 30], "a checkpoint was called complete too early"
    assert (len(steps), steps[-1]) > (100, 0)


@pytest.mark.ray
@pytest.mark.skipif("MEGATRAIN_SOAK" not in os.environ, reason="make soak runs it")
@pytest.mark.timeout(3600)
def test_a_run_that_loses_power_again_and_again_ends_in_the_same_bits(recipe: Path) -> None:
    """At operations of a step and at files of a checkpoint; now all that was not fsynced is gone, now some of it."""
    options = ("train.steps=60", "checkpoint.every_steps=2", "checkpoint.keep_last=1", "eval.every_steps=6")
    undisturbed, inside = recipe.parent / "power-undisturbed", recipe.parent / "power-traps"
    with running(recipe, undisturbed, *options, inside=inside) as run:
        assert run.finish() == 0, run.output()
    chance, root, found = random.Random(SEED), recipe.parent / "power", recipe.parent / "power-found"
    (root / "new").mkdir(parents=True)
    run_dir, log = root / "new" / "run", recipe.parent / "power.log"
    files = chance.sample(changes(inside), 8)
    points = ["os.rename manifest.json.partial", "os.rename .partial", "os.rename ", "update", "snapshot", *files]
    begin(root, inside)
    for number, point in enumerate(points):
        with running(recipe, run_dir, *options, log=log, inside=inside, durable=root) as run:
            run.spring(Trap(point, POWER, skip=chance.randint(0, 2)))
        journal = Journal(root, inside)
        if number % 2:
            journal.after_chance(root, found, chance)
        else:
            journal.after_loss(found)
        put_back(root, found)
        begin(root, inside)
    with running(recipe, run_dir, *options, log=log) as run:
        assert run.finish() == 0, run.output()
    assert_same_run(run_dir, undisturbed, 60)
    sys.stdout.write(f"\nlosses of power: tried {len(points)}, survived {len(points)}\n")
