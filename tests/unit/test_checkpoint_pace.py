"""What a plan says a checkpoint costs: the drive's time, what of it is waited for, and the setting that spares it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
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
RECIPE = RECIPES / "bench" / "qwen2.5-3b.toml"
EVERY = "checkpoint.every_steps=100"
STATE_BYTES = 12 * 3_085_938_688
"""Of Qwen2.5 3B."""


def plan(*settings: str, recipe: Path = RECIPE, hardware: str = "h200-measured") -> Plan:
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
    # An H200 machine's step after a checkpoint was 7.1 to 8.1 s longer, copies and a slower drive included.
    assert found.wait_s == pytest.approx((STATE_BYTES - staged) / 2.23e9 - step_s, rel=0.01)
    assert found.wait_s == pytest.approx(6.1, abs=0.1)
    assert f"for which every 100 steps wait {shown_duration(found.wait_s)} (2.7%)" in tables(planned)


@pytest.mark.parametrize("chosen", [None, 5, 20])
def test_the_staging_memory_that_is_advised_spares_the_wait_and_a_gibibyte_less_does_not(chosen: int | None) -> None:
    planned = plan(*(() if chosen is None else (f"checkpoint.staging_gib={chosen}",)))
    enough = pace(planned).enough_staging_gib
    assert 0 < enough < STATE_BYTES / GIB
    spared, nearly = (pace(plan(f"checkpoint.staging_gib={gib}")) for gib in (enough, enough - 1))
    assert (spared.wait_s, spared.enough_staging_gib) == (0.0, 0)
    assert nearly.wait_s > 0 and nearly.enough_staging_gib == enough
    assert f"with checkpoint.staging_gib = {enough} for copies alone" in tables(planned)
    assert "beside steps that do not wait for the drive" in tables(plan(f"checkpoint.staging_gib={enough}"))


def test_what_is_advised_fits_every_machine_that_it_is_advised_for() -> None:
    """The least of them was given the advice and refused it: what holds the copies takes memory too."""
    hardware, enough = load_hardware(find_hardware("h200-measured")), pace(plan()).enough_staging_gib

    def planned(centigib: int, *settings: str) -> Plan:
        host = replace(hardware.host, memory_gib=centigib / 100)
        return make_plan(load_recipe(RECIPE, (EVERY, *settings)), replace(hardware, host=host))

    least = bisect_left(range(12_500), True, lo=6000, key=lambda size: pace(planned(size)).enough_staging_gib == enough)
    assert pace(planned(least - 1)).enough_staging_gib == 0
    for centigib in (least, least + 1, least + 10):
        advised = planned(centigib, f"checkpoint.staging_gib={enough}")
        assert advised.fits and pace(advised).wait_s == 0.0
        # Nothing else moves for it.
        assert advised.placement.tier == planned(centigib).placement.tier


def test_checkpoints_that_come_faster_than_they_are_written_hold_up_every_one_of_their_steps() -> None:
    for every in (1, 4, 7):
        planned = plan(f"checkpoint.every_steps={every}", "checkpoint.staging_gib=30")
        assert planned.time is not None
        found, step_s = pace(planned), planned.time.prediction.step_s
        assert found.too_often and found.enough_staging_gib == 0
        assert found.wait_s + every * step_s == pytest.approx(found.write_s)
        assert "raise checkpoint.every_steps" in tables(planned)
    assert not pace(plan("checkpoint.every_steps=8", "checkpoint.staging_gib=30")).too_often


def test_layers_on_nvme_wait_whatever_is_staged() -> None:
    spilled = pace(plan(recipe=RECIPES / "plan" / "qwen2.5-14b.toml"))
    assert spilled.write_gbps == 1.12 and spilled.wait_s > 100 and spilled.enough_staging_gib == 0


def test_long_steps_wait_for_nothing() -> None:
    found = pace(plan(recipe=RECIPES / "plan" / "qwen2.5-7b.toml", hardware="rtx4090-256gb-1nvme"))
    assert found.wait_s == 0.0 and found.write_s > 5


def test_what_is_not_known_is_not_said() -> None:
    compressed = plan("checkpoint.compression=zstd")
    assert compressed.time is not None and compressed.time.checkpoint is None
    for settings in (("checkpoint.every_steps=0",), ("train.steps=100",)):
        assert "GB/s; no step follows" in tables(plan(*settings))
