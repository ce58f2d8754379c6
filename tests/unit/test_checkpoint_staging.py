"""Memory for what a checkpoint has not written yet: in the plan, within what it may take, far from the state's size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.machine_memory import MachineMemory
from pipeline.memory.checkpoint_staging import with_checkpoint_staging
from pipeline.memory.footprint import GIB, Place
from pipeline.memory.host_footprint import CHECKPOINT_STAGING
from pipeline.placement import Placement, PlacementError
from pipeline.prediction.hardware import SHIPPED
from pipeline.recipe import RecipeError, load_recipe
from pipeline.recipe_placement import place_recipe, shape_of
from tiers.staging import BLOCK_BYTES

RECIPE = SHIPPED.parent / "plan" / "qwen2.5-14b.toml"
STATE_BYTES = 12 * 14_770_033_664
"""Of Qwen2.5-14B."""
NOW_AND_THEN = "checkpoint.every_steps=100"


def placed(*settings: str, host_gib: float = 500, nvme_gib: float = 0) -> Placement:
    recipe = load_recipe(RECIPE, ("memory.nvme_dir=", "memory.ram_gib=", "memory.nvme_gib=", *settings))
    machine = MachineMemory(True, int(host_gib * GIB), 80 * GIB, int(nvme_gib * GIB), 16)
    return place_recipe(recipe, shape_of(recipe), machine, optimizer_actors=4)


def in_account(placement: Placement) -> int:
    return sum(term.num_bytes for term in placement.terms if term.name == CHECKPOINT_STAGING)


def test_with_much_memory_half_of_the_state_has_room_and_the_plan_says_so() -> None:
    without, placement = placed("checkpoint.every_steps=0"), placed(NOW_AND_THEN)
    assert without.staging_bytes == in_account(without) == 0
    assert abs(placement.staging_bytes - STATE_BYTES // 2) < STATE_BYTES // 1000
    assert placement.staging_bytes % BLOCK_BYTES == 0
    assert placement.staging_bytes <= in_account(placement) <= placement.staging_bytes * 1.01
    assert placement.used(Place.RAM) == without.used(Place.RAM) + in_account(placement)


def test_the_model_comes_first_and_what_it_leaves_is_not_passed() -> None:
    without = placed("checkpoint.every_steps=0")
    ram = without.arena_bytes / GIB + 3
    placement = placed(NOW_AND_THEN, f"memory.ram_gib={ram}")
    assert placement.tier == without.tier
    assert 3 * GIB - 2 * BLOCK_BYTES < placement.staging_bytes <= 3 * GIB
    assert placed(NOW_AND_THEN, f"memory.ram_gib={without.arena_bytes / GIB + 0.001}").staging_bytes == 0


def test_state_on_nvme_is_copied_from_file_to_file_and_has_no_share(tmp_path: Path) -> None:
    settings = ("checkpoint.every_steps=0", f'memory.nvme_dir="{tmp_path}"', "memory.ram_gib=60")
    spilled = placed(*settings, host_gib=1000, nvme_gib=2000)
    roomy = replace(spilled, budget=replace(spilled.budget, ram_bytes=2**50))
    homes = zip(spilled.tier.model.layers, spilled.tier.homes, strict=True)
    in_ram = sum(12 * layer.numel for layer, home in homes if home.state_slot is None)
    assert in_ram < STATE_BYTES // 2
    found = with_checkpoint_staging(roomy, None).staging_bytes
    assert found == in_ram // 2 // BLOCK_BYTES * BLOCK_BYTES


def test_what_a_recipe_asks_for_is_taken_off_what_the_machine_has() -> None:
    assert placed(NOW_AND_THEN, "checkpoint.staging_gib=100").staging_bytes == 100 * GIB
    assert placed(NOW_AND_THEN, "checkpoint.staging_gib=0").staging_bytes == 0
    # No step follows on the last checkpoint of a run.
    assert placed("checkpoint.every_steps=0", "checkpoint.staging_gib=100").staging_bytes == 0
    host_gib = placed("checkpoint.every_steps=0").used(Place.RAM) / GIB + 20
    assert placed(NOW_AND_THEN, host_gib=host_gib).staging_bytes > 0
    with pytest.raises(PlacementError, match=r"checkpoint\.staging_gib = 150\.0 is taken off host memory; lower it"):
        placed(NOW_AND_THEN, "checkpoint.staging_gib=150", host_gib=host_gib)
    with pytest.raises(RecipeError, match=r"checkpoint\.staging_gib"):
        placed(NOW_AND_THEN, "checkpoint.staging_gib=-1")
