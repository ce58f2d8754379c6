"""Boundary activations that the device cannot hold: which ways are tried, what they take, and which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.boundary_plans import boundary_plans, streaming_slots
from pipeline.memory.device_footprint import device_terms
from pipeline.memory.footprint import GIB, Place, total
from pipeline.memory.host_footprint import arena_terms
from pipeline.memory.placement_search import variants
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from pipeline.placement import MemoryBudget, Placement, PlacementError, PlacementRequest, place, summary
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Device, Hardware, Host, Link
from pipeline.prediction.placement_choice import choose
from pipeline.prediction.simulate import simulate
from pipeline.step.layer_groups import LayerGroups
from tiers.arena_map import ArenaMap
from tiers.layout import InitKind, LayerKind, LayerLayout, ModelLayout, Precision, TensorSpec, place_tensors

COMPUTE = ComputeShape(
    hidden_size=2048, intermediate_size=5504, query_size=2048, kv_size=512, head_size=128, vocab_size=32768
)
STEP = StepShape(sequence_length=2048, sequences=64, micro_batch=2)
BOUNDARY_BYTES = STEP.tokens * COMPUTE.hidden_size * 2
ROOMY = MemoryBudget(2**50, 2**50)
MACHINE = Hardware(
    name="test",
    origin="made up",
    device=Device("gpu", 80.0, 500.0, 2000.0, 0.8),
    link=Link(25.0, 25.0, 20.0),
    host=Host(16, 512.0, 100.0, 4.0, 3.0),
)
SLOW_LINK = replace(MACHINE, link=Link(1.0, 0.3, 0.3))


def layer(index: int, name: str, kind: LayerKind, numel: int) -> LayerLayout:
    tensors, padded = place_tensors([TensorSpec(f"{name}.weight", (numel,), 0, True, InitKind.NORMAL)])
    return LayerLayout(index, name, kind, tensors, padded)


def request(decoders: int = 24, *, clip: bool = True, tied: bool = False) -> PlacementRequest:
    vocab = COMPUTE.vocab_size * COMPUTE.hidden_size
    layers = [layer(0, "embedding", LayerKind.EMBEDDING, vocab)]
    layers += [layer(i + 1, f"layer-{i:04d}", LayerKind.DECODER, 44_000_000) for i in range(decoders)]
    layers.append(layer(decoders + 1, "head", LayerKind.HEAD, COMPUTE.hidden_size if tied else vocab))
    model = ModelLayout(tuple(layers), Precision.BF16, tied)
    return PlacementRequest(model, COMPUTE, STEP, clip, ProcessShape(), kept_layers=0, device_updates=False)


def short_of(wanted: PlacementRequest, boundaries: int) -> MemoryBudget:
    """A device that lacks room for so many layers' inputs."""
    return replace(ROOMY, gpu_bytes=place(wanted, ROOMY).used(Place.DEVICE) - boundaries * BOUNDARY_BYTES)


def chosen(wanted: PlacementRequest, budget: MemoryBudget, hardware: Hardware = MACHINE) -> Placement:
    found = choose(wanted, budget, hardware)
    assert isinstance(found, Placement)
    return found


def way(placement: Placement) -> tuple[int, int, bool]:
    """K, waves, and whether anything spills."""
    return placement.schedule.boundary_every, placement.schedule.waves, placement.spilled_boundaries > 0


def test_a_device_with_room_holds_every_layers_input_of_the_whole_step() -> None:
    assert way(chosen(request(), ROOMY)) == (1, 1, False)
    assert [(each.boundary_every, each.waves) for each in variants(request(), ROOMY)] == [(1, 1)]


@pytest.mark.parametrize(
    ("spare_gib", "wanted_way"),
    [(0.0, (3, 1, False)), (1.5, (2, 1, True)), (3.0, (1, 2, False)), (100.0, (1, 1, True))],
    ids=["thinned", "thinned and spilled", "two waves", "spilled"],
)
def test_the_ram_there_is_decides_how_inputs_that_the_device_has_no_room_for_are_held(
    spare_gib: float, wanted_way: tuple[int, int, bool]
) -> None:
    """Spilling takes 6 GiB and no time, the sums of waves 2.1 GiB and hardly any, thinning none and an eighth."""
    wanted = request()
    ram_bytes = place(wanted, ROOMY).arena_bytes + int(spare_gib * GIB)
    assert way(chosen(wanted, replace(short_of(wanted, 11), ram_bytes=ram_bytes))) == wanted_way


def test_the_log_says_how_boundaries_are_held() -> None:
    wanted = request()
    thinned = chosen(wanted, replace(short_of(wanted, 10), ram_bytes=place(wanted, ROOMY).arena_bytes))
    assert summary(thinned).endswith("; boundary activations: every 2nd layer, 1 wave")
    assert thinned.schedule.decoder_slots == 3, "the weights of two layers lie still while a third's come"
    assert "boundary" not in summary(place(wanted, ROOMY))
    spilled = place(wanted, short_of(wanted, 10))
    assert summary(spilled).endswith("; boundary activations: every layer, 1 wave, 12 of 24 in pinned RAM")


def test_a_slow_link_makes_a_recompute_cheaper_than_a_spill() -> None:
    assert way(chosen(request(), short_of(request(), 10), SLOW_LINK)) == (2, 1, False)


def test_the_fastest_of_all_that_fit_is_chosen() -> None:
    wanted = request()
    budget = short_of(wanted, 20)
    found = [place(variant, budget) for variant in variants(wanted, budget)]
    assert len(found) > 4
    times = [simulate(CostModel(each, COMPUTE, STEP, MACHINE)).step_s for each in found]
    best = simulate(CostModel(chosen(wanted, budget), COMPUTE, STEP, MACHINE)).step_s
    assert best <= 1.02 * min(times)


def test_what_the_recipe_fixes_is_kept() -> None:
    wanted = replace(request(), boundary_every=4, waves=2)
    placement = chosen(wanted, ROOMY)
    assert way(placement) == (4, 2, False)
    assert summary(placement).endswith("; boundary activations: every 4th layer, 2 waves")


@settings(max_examples=25, deadline=None)
@given(
    every=st.sampled_from([None, 1, 2, 5]),
    waves=st.sampled_from([None, 1, 2, 3]),
    short=st.integers(0, 23),
    clip=st.booleans(),
    tied=st.booleans(),
    ram=st.integers(0, 6),
)
def test_every_way_keeps_within_the_budgets_and_its_account_adds_up(
    every: int | None, waves: int | None, short: int, clip: bool, tied: bool, ram: int
) -> None:
    wanted = request(clip=clip, tied=tied)
    budget = replace(short_of(wanted, short), ram_bytes=place(wanted, ROOMY).arena_bytes + ram * GIB)
    try:
        placement = place(replace(wanted, boundary_every=every, waves=waves), budget)
    except PlacementError:
        return
    assert placement.used(Place.DEVICE) <= budget.gpu_bytes and placement.arena_bytes <= budget.ram_bytes
    assert total(arena_terms(placement.tier)) == ArenaMap.of(placement.tier).total_bytes
    room = placement.spilled_boundaries * STEP.largest_wave(placement.schedule.waves).tokens * COMPUTE.hidden_size * 2
    assert placement.tier.activation_bytes == room


@pytest.mark.parametrize("clip", [True, False])
def test_sums_of_waves_take_two_bytes_a_parameter_beside_held_gradients_and_four_without(clip: bool) -> None:
    wanted = request(clip=clip)
    one, two = (place(replace(wanted, waves=waves), ROOMY) for waves in (1, 2))
    summed = sum(layer.numel for layer in wanted.model.layers[1:])
    ring = 0 if clip else next(term.num_bytes for term in one.terms if term.name == "gradients")
    own = 0 if clip else 2 * wanted.model.layers[0].numel
    assert two.arena_bytes - one.arena_bytes == (2 if clip else 4) * summed + own - ring
    arena = ArenaMap.of(two.tier)
    for index, sums in arena.gradient_sums.items():
        assert sums.offset_bytes == arena.gradients[index].offset_bytes


@pytest.mark.parametrize(("every", "waves"), [(1, 1), (4, 1), (1, 4), (4, 2)])
def test_depth_costs_the_device_nothing_once_every_kept_input_spills(every: int, waves: int) -> None:
    accounts = []
    for decoders in (24, 48):
        terms = device_terms(
            request(decoders).model,
            COMPUTE,
            STEP,
            2,
            decoder_slots=2,
            spilled_boundaries=LayerGroups(decoders, every).count,
            boundary_every=every,
            waves=waves,
        )
        accounts.append(total(terms))
    assert accounts[0] == accounts[1]


def test_ways_come_in_order_of_preference_and_none_needs_more_than_the_step_has() -> None:
    assert list(boundary_plans(8, 3))[:4] == [(1, 1), (2, 1), (3, 1), (1, 2)]
    assert list(boundary_plans(2, 1)) == [(1, 1)]
    assert list(boundary_plans(8, 1, every=3, waves=2)) == [(3, 2)]


def test_neighbouring_groups_begin_in_different_slots() -> None:
    assert [streaming_slots(every, 2) for every in (1, 2, 3, 4, 5)] == [2, 3, 2, 3, 2]
    assert streaming_slots(6, 1) == 1, "one slot is asked for to save memory, not time"
