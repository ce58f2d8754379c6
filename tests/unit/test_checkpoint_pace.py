"""What a plan says a checkpoint costs: the drive's time, what of it is waited for, and the setting that spares it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.prediction.checkpoint_pace import CheckpointPace
from pipeline.prediction.hardware import SHIPPED, find_hardware, load_hardware
from pipeline.recipe import load_recipe
from tasks.plan import make_plan
from tasks.plan_report import Plan
from tasks.plan_tables import tables
from tiers.host_memory import GIB
from tiers.quantities import shown_duration

RECIPES = SHIPPED.parent
EVERY = "checkpoint.every_steps=100"
STATE_BYTES = 12 * 3_085_938_688
"""Of Qwen2.5 3B."""


def plan(*settings: str, recipe: Path = RECIPES / "bench" / "qwen2.5-3b.toml", hardware: str = "h200-measured") -> Plan:
    return make_plan(load_recipe(recipe, (EVERY, *settings)), load_hardware(find_hardware(hardware)))


def pace(plan: Plan) -> CheckpointPace:
    assert plan.time is not None and plan.time.checkpoint is not None
    return plan.time.checkpoint


def test_the_wait_is_what_neither_the_drive_nor_staging_takes_in_a_step() -> None:
    planned = plan()
    assert planned.time is not None
    found, step_s, staged = pace(planned), planned.time.prediction.step_s, planned.placement.staging_bytes
    assert staged == pytest.approx(STATE_BYTES / 2, rel=0.01)
    assert found.write_s == pytest.approx(STATE_BYTES / 2.23e9, rel=0.01)
    # An H200 machine's step after a checkpoint was 7.1 to 8.1 s longer, some of it for copies.
    assert (
        found.wait_s == pytest.approx((STATE_BYTES - staged) / 2.23e9 - step_s, rel=0.01) == pytest.approx(6.1, abs=0.1)
    )
    assert f"the step after it waits {shown_duration(found.wait_s)} for that, 2.7% of 100 steps" in tables(planned)


def test_the_staging_memory_that_is_advised_spares_the_wait_and_a_gibibyte_less_does_not() -> None:
    enough = pace(plan()).enough_staging_gib
    assert 0 < enough < STATE_BYTES / GIB
    spared, nearly = (pace(plan(f"checkpoint.staging_gib={gib}")) for gib in (enough, enough - 1))
    assert (spared.wait_s, spared.enough_staging_gib) == (0.0, 0)
    assert nearly.wait_s > 0 and nearly.enough_staging_gib == enough
    assert f"checkpoint.staging_gib = {enough} spares that" in tables(plan())
    assert "beside steps that do not wait for it" in tables(plan(f"checkpoint.staging_gib={enough}"))


def test_no_more_is_advised_than_ram_has_room_for() -> None:
    tight = plan("memory.ram_gib=45")
    assert pace(tight).wait_s > pace(plan()).wait_s and pace(tight).enough_staging_gib == 0


def test_layers_on_nvme_wait_whatever_is_staged() -> None:
    spilled = pace(plan(recipe=RECIPES / "plan" / "qwen2.5-14b.toml", hardware="h200-measured"))
    assert spilled.write_gbps == 1.12 and spilled.wait_s > 100 and spilled.enough_staging_gib == 0


def test_long_steps_wait_for_nothing() -> None:
    found = pace(plan(recipe=RECIPES / "plan" / "qwen2.5-7b.toml", hardware="rtx4090-256gb-1nvme"))
    assert found.wait_s == 0.0 and found.write_s > 5


def test_what_is_not_known_is_not_said() -> None:
    compressed = plan("checkpoint.compression=zstd")
    assert compressed.time is not None and compressed.time.checkpoint is None
    last = tables(plan("checkpoint.every_steps=0"))
    assert "GB/s, at the end" in last and "waits" not in last.splitlines()[-1]
