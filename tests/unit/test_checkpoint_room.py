"""FAULTS B145: a disk that cannot hold a run's checkpoints is told before the run, with changes that work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.footprint import Place
from pipeline.placement import MemoryBudget, Placement, place
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe_placement import request_of, shape_of
from support.small_recipe import SMALL_MODEL
from support.stores import random_arrays, saved_facts, small_model, write_layer
from tasks import plan, train
from tasks.checkpoint_room import CheckpointFigures, RunDisk, checkpoint_figures, most_at_a_time
from tiers import checkpoint
from tiers.checkpoint import required_bytes
from tiers.direct_io import DirectIO
from tiers.layout import Precision
from tiers.preflight import preflight
from tiers.shard_store import ShardStore

RECIPE = f"""{SMALL_MODEL}[data]
path = "text"
[train]
steps = 100
sequence_length = 64
sequences_per_step = 8
device = "cpu"
[checkpoint]
every_steps = 10
"""
ENDLESS = ("--set", "train.steps=1000000000", "--set", "checkpoint.every_steps=1", "--set")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words " * 500)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + f'[run]\ndir = "{tmp_path / "run"}"\n')
    return recipe


def placed(recipe: Recipe, budget: MemoryBudget | None = None) -> Placement:
    request = request_of(recipe, shape_of(recipe), cuda=False, optimizer_actors=1)
    return place(request, budget or MemoryBudget(2**50, 2**50))


@settings(deadline=None)
@given(
    steps=st.integers(1, 40),
    every=st.integers(0, 12),
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 12),
    start=st.integers(0, 40),
    before=st.sets(st.integers(1, 40), max_size=6),
)
def test_as_many_at_a_time_as_a_run_that_writes_and_prunes_comes_to(
    steps: int, every: int, keep_last: int, keep_every: int, start: int, before: set[int]
) -> None:
    recipe = _recipe(steps, every, keep_last, keep_every)
    held = sorted(step for step in before | {start} if 0 < step <= start)
    most, kept = len(held), held.copy()
    for step in range(start + 1, steps + 1):
        if step == steps or (every and step % every == 0):
            kept.append(step)
            most = max(most, len(kept))
            kept = [each for each in kept[:-keep_last] if keep_every and each % keep_every == 0] + kept[-keep_last:]
    assert most_at_a_time(recipe, start, held) == most


def _recipe(steps: int, every: int, keep_last: int, keep_every: int) -> Recipe:
    return Recipe.model_validate_json(
        json.dumps(
            {
                "run": {"name": "r", "dir": "/nowhere"},
                "model": {"source": "/nowhere"},
                "data": {"path": "/nowhere"},
                "train": {"steps": steps, "sequence_length": 8, "sequences_per_step": 1},
                "checkpoint": {"every_steps": every, "keep_last": keep_last, "keep_every": keep_every},
            }
        )
    )


def figures(recipe: Recipe, disk: RunDisk, placement: Placement | None = None) -> CheckpointFigures:
    return checkpoint_figures(recipe, placement or placed(recipe), disk)


def test_a_refusal_names_needed_and_free_bytes_and_every_change_in_it_works(path: Path) -> None:
    recipe = load_recipe(path, ("checkpoint.keep_last=6", "checkpoint.keep_every=20"))
    each = required_bytes(placed(recipe).tier.model)
    disk = RunDisk(recipe.run.dir, free_bytes=4 * each, start=0)
    text = figures(recipe, disk).refusal
    assert text is not None and "at most 8 at a time" in text
    offered = re.findall(r"checkpoint\.(\w+) = (\d+)", text)
    assert [key for key, _ in offered] == ["every_steps"], "the others alone do not do"
    recipe = load_recipe(path, ("checkpoint.keep_last=6",))
    text = figures(recipe, disk).refusal
    assert text is not None
    offered = re.findall(r"checkpoint\.(\w+) = (\d+)", text)
    assert offered == [("keep_last", "3"), ("every_steps", "0")]
    for key, value in offered:
        assert figures(load_recipe(path, ("checkpoint.keep_last=6", f"checkpoint.{key}={value}")), disk).refusal is None
    assert f"run.dir = {recipe.run.dir} has no room" in text and "run.dir on a disk with" in text


def test_what_is_there_already_is_not_asked_for_again(path: Path) -> None:
    recipe = load_recipe(path)
    each = required_bytes(placed(recipe).tier.model)
    fresh = RunDisk(recipe.run.dir, free_bytes=each, start=0)
    assert figures(recipe, fresh).refusal is not None
    resumed = RunDisk(recipe.run.dir, free_bytes=each, start=50, held=(40, 50), held_bytes=each)
    assert figures(recipe, resumed).refusal is None
    assert figures(recipe, RunDisk(recipe.run.dir, each - 1, 50, (40, 50), each)).refusal is not None
    assert figures(recipe, RunDisk(recipe.run.dir, 0, 100, (90, 100), each)).refusal is None, "nothing is left to write"


def test_compressed_ones_are_taken_to_be_as_large_as_those_before(path: Path) -> None:
    recipe = load_recipe(path, ("checkpoint.compression=zstd", "checkpoint.keep_last=3"))
    each = required_bytes(placed(recipe).tier.model)
    room = 2 * (each // 2) + each
    assert figures(recipe, RunDisk(recipe.run.dir, room, 10, (10,), each // 2)).refusal is None
    assert figures(recipe, RunDisk(recipe.run.dir, room - 1, 10, (10,), each // 2)).refusal is not None


def test_nvme_files_on_the_same_file_system_need_room_beside_them(path: Path) -> None:
    recipe = load_recipe(path)
    in_ram = placed(recipe)
    spilled = placed(recipe, MemoryBudget(in_ram.arena_bytes * 3 // 4, 2**50, 2**50))
    scratch, each = spilled.used(Place.NVME), required_bytes(in_ram.tier.model)
    assert scratch > 0
    disk = RunDisk(recipe.run.dir, free_bytes=3 * each + scratch - 1, start=0, shared=True)
    assert figures(recipe, disk, in_ram).refusal is None
    text = figures(recipe, disk, spilled).refusal
    assert text is not None and "memory.nvme_dir, which is on the same file system" in text
    assert "memory.nvme_dir on another disk" in text


def test_the_disk_is_looked_at_as_the_run_will_find_it(path: Path, tmp_path: Path) -> None:
    model = small_model(Precision.FP32, layers=0)
    (tmp_path / "nvme" / "megatrain-scratch").mkdir(parents=True)
    (tmp_path / "nvme" / "megatrain-scratch.lock").touch()
    recipe = load_recipe(path, (f"memory.nvme_dir={tmp_path / 'nvme'}",))
    run_dir = recipe.run.dir
    with DirectIO(requests=1) as io:
        for step in (10, 20, 30):
            writer = checkpoint.begin(run_dir, step, model)
            store = ShardStore(writer.directory, model, io, preflight(writer.directory))
            arrays = ((layer, random_arrays(model, layer, step)) for layer in model.layers)
            records = [record for layer, each in arrays for record in write_layer(store, layer, each)]
            writer.publish(records, saved_facts(model, step))
    found = RunDisk.of(recipe)
    assert (found.start, found.held, found.shared) == (30, (10, 20, 30), True) and found.held_bytes > 0
    assert RunDisk.of(recipe, start=20).held == (10, 20), "later ones are set aside and stay"
    ballast = 64 << 20
    for left in (run_dir / "checkpoints" / "step-000040.partial" / "c", tmp_path / "nvme" / "megatrain-scratch" / "c"):
        before = RunDisk.of(recipe).free_bytes
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(bytes(ballast))
        # Others use the disk meanwhile.
        assert abs(RunDisk.of(recipe).free_bytes - before) < ballast // 2, "what a dead run left is given back"
        left.unlink()


def test_plan_says_no_and_train_refuses_before_it_writes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = (*ENDLESS, "checkpoint.keep_last=100000000")
    assert plan.main((str(path), *many)) == 1
    text = capsys.readouterr().out
    assert "fits: NO" in text and "checkpoint.keep_last = " in text and "On a machine with" not in text
    assert plan.main((str(path), *many, "--json")) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False and "has no room" in told["reason"]
    assert told["checkpoints"]["kept"] == 100_000_001
    for options in ((), ("--dry-run",)):
        assert train.main((str(path), *many, *options)) == 2
        refused = capsys.readouterr().err
        assert refused.startswith("train: refused: run.dir = ") and refused.count("\n") == 1
    assert not (tmp_path / "run").exists()
    keep_last = text.partition("checkpoint.keep_last = ")[2].partition(";")[0]
    fewer = (*ENDLESS, f"checkpoint.keep_last={int(keep_last) * 9 // 10}")  # others use the disk meanwhile
    assert plan.main((str(path), *fewer)) == 0
