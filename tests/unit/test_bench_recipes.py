"""Every measured row has a recipe, says how to run it, and fits the machine that the rows are measured on."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pipeline.memory.footprint import Place
from pipeline.prediction.hardware import find_hardware, load_hardware
from pipeline.recipe import load_recipe
from tasks.plan import make_plan
from tasks.plan_report import Plan

FOLDER = Path(__file__).parents[2] / "tasks" / "recipes" / "bench"
RECIPES = sorted(FOLDER.glob("*.toml"))


@cache
def planned(name: str, *overrides: str) -> Plan:
    recipe = load_recipe(FOLDER / f"{name}.toml", overrides)
    return make_plan(recipe, load_hardware(find_hardware("h200-measured")))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_fits_the_measured_machine_and_names_its_command(path: Path) -> None:
    plan = planned(path.stem)
    assert plan.fits, plan.reason
    comment = re.match(r"(#.*\n)+", path.read_text())
    assert comment and f"python -m tasks.bench {'checkpoint' if 'checkpoint' in path.stem else 'step'}" in comment[0]
    assert f"tasks/recipes/bench/{path.name}" in comment[0]


def test_every_row_has_its_recipe() -> None:
    rows = {
        *("qwen2.5-7b", "qwen2.5-7b-recomputed", "qwen2.5-7b-recomputed-131k", "qwen2.5-7b-24gib"),
        *("qwen2.5-7b-unclipped", "qwen2.5-7b-one-131k", "qwen2.5-7b-one-262k"),
        *("qwen2.5-3b", "qwen2.5-3b-recomputed", "qwen2.5-0.5b", "qwen2.5-14b-nvme", "qwen2.5-depth"),
    }
    assert rows <= {path.stem for path in RECIPES}


def test_rows_are_what_they_are_called() -> None:
    for name in ("qwen2.5-7b-recomputed", "qwen2.5-7b-recomputed-131k", "qwen2.5-3b-recomputed"):
        assert planned(name).placement.schedule.kept_layers == 0
    for name in ("qwen2.5-7b", "qwen2.5-3b", "qwen2.5-0.5b"):
        assert planned(name).placement.schedule.kept_layers > 0
    assert not planned("qwen2.5-7b-unclipped").placement.schedule.clip
    assert planned("qwen2.5-14b-nvme").placement.used(Place.NVME) > 0
    assert planned("qwen2.5-7b-24gib").placement.used(Place.DEVICE) <= 24 * 2**30


def test_device_memory_does_not_depend_on_depth() -> None:
    plans = [planned("qwen2.5-depth", f"model.config.num_hidden_layers={count}") for count in (28, 56, 84)]
    assert all(plan.fits for plan in plans)
    used = [plan.placement.used(Place.DEVICE) for plan in plans]
    assert max(used) <= 1.02 * min(used)
