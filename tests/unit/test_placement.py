from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.drive_footprint import drive_bytes
from pipeline.memory.footprint import GIB, Place, total
from pipeline.memory.homes import Spill, homes, spills
from pipeline.memory.host_footprint import arena_terms
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from pipeline.memory.spill_bytes import all_spill_bytes
from pipeline.placement import MemoryBudget, Placement, PlacementError, PlacementRequest, place, preflight, summary
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.layout import (
    Buffer,
    ElementType,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    place_tensors,
)

COMPUTE = ComputeShape(hidden_size=64, intermediate_size=256, query_size=64, kv_size=32, head_size=16, vocab_size=4096)
STEP = StepShape(sequence_length=128, sequences=8, micro_batch=2)
ROOMY = MemoryBudget(ram_bytes=2**50, gpu_bytes=2**50)
PROCESSES = ProcessShape(optimizer_actors=2, cuda=False)


def layer(index: int, name: str, kind: LayerKind, numel: int) -> LayerLayout:
    tensors, padded = place_tensors([TensorSpec(f"{name}.weight", (numel,), 0, True, InitKind.NORMAL)])
    return LayerLayout(index, name, kind, tensors, padded)


def model(decoders: int = 8, decoder: int = 1 << 20, vocab: int = 4 << 20, tied: bool = False) -> ModelLayout:
    layers = [layer(0, "embedding", LayerKind.EMBEDDING, vocab)]
    layers += [layer(i + 1, f"layer-{i:04d}", LayerKind.DECODER, decoder) for i in range(decoders)]
    layers.append(layer(decoders + 1, "head", LayerKind.HEAD, 64 if tied else vocab))
    return ModelLayout(tuple(layers), Precision.BF16, tied)


def request(layout: ModelLayout, *, clip: bool = True, slots: int = 3) -> PlacementRequest:
    return PlacementRequest(layout, COMPUTE, STEP, clip, PROCESSES, staging_slots=slots, kept_layers=0)


def every_homes(layout: ModelLayout, *, clip: bool, slots: int = 3) -> list[tuple[LayerHome, ...]]:
    """Of every way to put something on NVMe."""
    ways = spills(layout, staging_slots=slots)
    return [
        homes(layout, clip=clip, state=way.state, weights=way.weights, staging_slots=way.staging_slots) for way in ways
    ]


def squeezed(request_: PlacementRequest, saved_bytes: int, nvme: int = 2**50) -> MemoryBudget:
    """A budget `saved_bytes` below what the model needs in RAM alone."""
    return replace(ROOMY, ram_bytes=place(request_, ROOMY).arena_bytes - saved_bytes, nvme_bytes=nvme)


def without_room_for_gradients(request_: PlacementRequest, budget: MemoryBudget) -> MemoryBudget:
    """The same with a device that can hold nothing beyond what every placement needs."""
    return replace(budget, gpu_bytes=place(request_, ROOMY).used(Place.DEVICE))


def test_keeps_everything_in_ram_when_it_fits_even_with_a_drive() -> None:
    placement = place(request(model()), replace(ROOMY, nvme_bytes=2**50))
    assert all(home.weight_slot is None and home.state_slot is None for home in placement.tier.homes)
    assert placement.used(Place.NVME) == 0


def test_spills_state_of_the_fewest_decoder_layers_that_fit_spread_over_the_depth() -> None:
    wanted = request(model(decoders=16))
    state_bytes = (1 << 20) * 10
    placement = place(wanted, without_room_for_gradients(wanted, squeezed(wanted, 2 * state_bytes)))
    spilled = [index for index, home in enumerate(placement.tier.homes) if home.state_slot is not None]
    # Two layers fill the staging slots before the first byte is saved; a third slot would put one more on the drive.
    assert len(spilled) == 4
    gaps = [b - a for a, b in itertools.pairwise(spilled)]
    assert max(gaps) - min(gaps) <= 1
    assert all(home.weight_slot is None for home in placement.tier.homes)


def test_spills_weights_only_when_all_state_is_spilled() -> None:
    wanted = request(model(decoders=16), clip=False)
    minimal = min(
        ArenaMap.of(replace(place(wanted, ROOMY).tier, homes=found)).total_bytes
        for found in every_homes(wanted.model, clip=False)
        if all(home.weight_slot is None for home in found)
    )
    saved = ArenaMap.of(place(wanted, ROOMY).tier).total_bytes - minimal
    placement = place(wanted, squeezed(wanted, saved + (4 << 20)))
    assert any(home.weight_slot is not None for home in placement.tier.homes)
    assert all(home.state_slot is not None for home in placement.tier.homes[:-1])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", Precision)
def test_bytes_by_arithmetic_are_those_of_the_arena_and_the_files(precision: Precision, tied: bool) -> None:
    layout = replace(model(decoders=5, decoder=(1 << 18) + 7, vocab=(1 << 18) + 4097, tied=tied), precision=precision)

    def plan_of(spill: Spill) -> TierPlan:
        held = 2
        placed = homes(
            layout,
            clip=True,
            state=spill.state,
            weights=spill.weights,
            staging_slots=spill.staging_slots,
            device_gradients=held,
        )
        return TierPlan(layout, placed, ElementType.FLOAT32, activation_bytes=12345)

    in_ram = ArenaMap.of(plan_of(Spill())).total_bytes
    ways = all_spill_bytes(layout, 3)
    assert len({way.spill for way in ways}) > 20
    for way in ways:
        plan = plan_of(way.spill)
        assert in_ram - way.saved_bytes == ArenaMap.of(plan).total_bytes
        assert way.nvme_bytes == drive_bytes(plan)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_consecutive_layers_never_share_a_slot_of_a_ring(slots: int, clip: bool, tied: bool) -> None:
    layout = model(tied=tied, vocab=1 << 20)
    for found in every_homes(layout, clip=clip, slots=slots):
        if sum(home.state_slot == 0 for home in found) == sum(home.state_slot is not None for home in found):
            continue  # one slot is the last resort, and has no order
        for kind in ("weight_slot", "state_slot"):
            used = [getattr(home, kind) for home in found if getattr(home, kind) is not None]
            assert all(a != b for a, b in itertools.pairwise(used))
        gradients = [home.gradient_slot for home in found]
        assert all(a != b for a, b in itertools.pairwise(gradients))
        assert len(set(gradients)) == (len(gradients) if clip else 2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [(3 << 19) + 2048, 2 << 20, 64 << 20])
def test_without_clipping_a_vocabulary_takes_both_gradient_slots_of_the_decoder_layers(vocab: int, tied: bool) -> None:
    """Its gradients leave at the two ends of the backward."""
    layout = model(vocab=vocab, tied=tied)
    tier = place(request(layout, clip=False), ROOMY).tier
    slots = [home.ram_gradient for home in tier.homes]
    assert slots[0] == range(2) and slots[-1] == (range(1) if tied else range(2))
    assert slots[1:-1] == [range(1), range(1, 2)] * 4
    gradients = ArenaMap.of(tier).gradients
    start, (first, second) = gradients[0].offset_bytes, gradients[1:3]
    assert first.offset_bytes == start and second.offset_bytes == start + first.num_bytes
    region = max(extent.offset_bytes + extent.num_bytes for extent in gradients) - start
    assert region == max(2 * vocab, first.num_bytes + second.num_bytes)
    assert ArenaMap.of(tier).states[0][Buffer.WEIGHT_LOW].offset_bytes == start + region


def test_a_vocabulary_smaller_than_a_decoder_layer_takes_a_gradient_slot_as_they_do() -> None:
    (found, *_) = every_homes(model(vocab=1 << 19), clip=False)
    assert [home.ram_gradient for home in found] == [range(index % 2, index % 2 + 1) for index in range(10)]


def test_gradients_that_wait_on_the_device_leave_for_the_same_ring() -> None:
    layout = model(vocab=64 << 20)
    placed = homes(layout, clip=True, state=(), weights=(), staging_slots=1, device_gradients=4)
    assert [home.ram_gradient for home in placed[6:]] == [range(6, 7), range(7, 8), range(6, 7), range(6, 8)]
    alone = homes(layout, clip=True, state=(), weights=(), staging_slots=1, device_gradients=1)
    assert alone[-1].ram_gradient == range(9, 10)


def test_small_layers_do_not_pay_for_slots_of_vocabulary_size() -> None:
    layout = model(vocab=64 << 20)
    every = list(range(len(layout.layers)))
    plan = replace(
        place(request(layout), ROOMY).tier,
        homes=homes(layout, clip=True, state=every, weights=[], staging_slots=3),
    )
    states = sum(
        term for term in {e.offset_bytes: e.num_bytes for s in ArenaMap.of(plan).states for e in s.values()}.values()
    )
    weights = sum(layer_.numel * 2 for layer_ in layout.layers)
    assert states - weights == 10 * (64 << 20) + 3 * 10 * (1 << 20)


def test_account_of_the_arena_adds_up_to_its_exact_size() -> None:
    for clip in (True, False):
        wanted = request(model(), clip=clip)
        for saved in (0, 20 << 20, 60 << 20):
            placement = place(wanted, squeezed(wanted, saved))
            assert total(arena_terms(placement.tier)) == ArenaMap.of(placement.tier).total_bytes


@settings(max_examples=30, deadline=None)
@given(
    decoders=st.integers(1, 12),
    saved=st.integers(0, 200 << 20),
    clip=st.booleans(),
    tied=st.booleans(),
    slots=st.sampled_from([2, 3]),
    nvme=st.integers(0, 1 << 30),
)
def test_an_answer_always_keeps_within_every_budget(
    decoders: int, saved: int, clip: bool, tied: bool, slots: int, nvme: int
) -> None:
    wanted = request(model(decoders, tied=tied), clip=clip, slots=slots)
    budget = squeezed(wanted, saved, nvme)
    try:
        placement = place(wanted, budget)
    except PlacementError:
        return
    assert placement.arena_bytes <= budget.ram_bytes
    assert placement.used(Place.DEVICE) <= budget.gpu_bytes
    assert placement.used(Place.NVME) <= budget.nvme_bytes
    assert placement.schedule.state_slots == tuple(home.state_slot for home in placement.tier.homes)


def test_boundary_activations_beyond_the_device_budget_go_to_pinned_ram() -> None:
    wanted = replace(request(model()), step=StepShape(sequence_length=4096, sequences=64, micro_batch=1))
    full = place(wanted, ROOMY)
    boundary = 4096 * 64 * COMPUTE.hidden_size * 2
    smaller = place(wanted, replace(ROOMY, gpu_bytes=full.used(Place.DEVICE) - 3 * boundary))
    assert full.tier.activation_bytes == 0
    assert smaller.tier.activation_bytes == smaller.spilled_boundaries * boundary > 0
    assert smaller.used(Place.DEVICE) <= smaller.budget.gpu_bytes


def held_on_device(placement: Placement) -> list[int]:
    return [index for index, home in enumerate(placement.tier.homes) if home.gradient_on_device]


def test_held_gradients_go_to_the_device_only_when_the_host_has_no_room_and_then_as_few_as_needed() -> None:
    wanted = request(model(decoders=16))
    roomy = place(wanted, ROOMY)
    assert held_on_device(roomy) == []
    tight = place(wanted, squeezed(wanted, 12 << 20))
    held = held_on_device(tight)
    assert 0 < len(held) < 18 and held == list(range(18 - len(held), 18))
    assert tight.used(Place.DEVICE) > roomy.used(Place.DEVICE)
    assert "held gradients" in {term.name for term in tight.terms}
    assert tight.schedule.device_gradients == tuple(home.gradient_on_device for home in tight.tier.homes)


def test_held_gradients_on_the_device_let_less_state_spill() -> None:
    wanted = request(model(decoders=16))
    budget = squeezed(wanted, 60 << 20)
    spread = [place(wanted, each) for each in (budget, without_room_for_gradients(wanted, budget))]
    assert [len(held_on_device(each)) for each in spread] == [18, 0]
    assert spread[0].used(Place.NVME) < spread[1].used(Place.NVME)


def test_a_large_model_needs_12_and_a_half_bytes_a_parameter_with_its_gradients_on_the_device() -> None:
    layout = model(decoders=48)
    every = homes(layout, clip=True, state=[], weights=[], staging_slots=3, device_gradients=50)
    tier = replace(place(request(layout), ROOMY).tier, homes=every)
    assert ArenaMap.of(tier).total_bytes / layout.num_parameters < 12.5


def test_refusal_names_needed_available_and_every_knob_that_helps() -> None:
    wanted = request(model())
    budget = without_room_for_gradients(wanted, squeezed(wanted, 8 << 20, nvme=0))
    with pytest.raises(PlacementError) as refused:
        place(wanted, budget)
    text = str(refused.value)
    assert "host memory needs" in text
    assert "memory.nvme_dir" in text
    assert "memory.ram_gib" in text
    assert "optimizer.max_grad_norm = 0" in text
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


def test_a_small_model_that_does_not_fit_has_its_parameters_in_millions() -> None:
    with pytest.raises(PlacementError, match=r"a model of [0-9.]+M parameters does not fit"):
        place(request(model()), MemoryBudget(ram_bytes=1 << 20, gpu_bytes=2**50))


def test_a_remedy_works_when_followed() -> None:
    wanted = replace(request(model()), step=StepShape(sequence_length=1024, sequences=512, micro_batch=256))
    budget = replace(ROOMY, gpu_bytes=GIB // 2, ram_bytes=1 * GIB)
    with pytest.raises(PlacementError, match=r"train\.micro_batch = (\d+)") as refused:
        place(wanted, budget)
    text = str(refused.value)
    micro_batch = int(text.split("train.micro_batch = ")[1].split(";")[0])
    place(replace(wanted, step=replace(wanted.step, micro_batch=micro_batch)), budget)
    gpu_gib = float(text.split("memory.gpu_gib = ")[1].split(";")[0])
    place(wanted, replace(budget, gpu_bytes=int(gpu_gib * GIB)))


def test_too_small_a_drive_is_refused_with_the_bytes_it_needs() -> None:
    wanted = request(model(decoders=16))
    with pytest.raises(PlacementError, match=r"NVMe needs .* memory\.nvme_dir on a drive with"):
        place(wanted, squeezed(wanted, 60 << 20, nvme=1 << 20))


def test_preflight_refuses_what_the_machine_lost_since_the_plan() -> None:
    """FAULTS B74: the limit that counts is the one the caller measured, cgroup included."""
    placement = place(request(model()), ROOMY)
    enough = placement.used(Place.RAM)
    preflight(placement, host_available_bytes=enough, gpu_free_bytes=2**50)
    with pytest.raises(PlacementError, match=r"host memory: needs .* memory\.ram_gib"):
        preflight(placement, host_available_bytes=enough - 1, gpu_free_bytes=2**50)


def test_nvme_mode_lists_its_staging_buffers() -> None:
    """FAULTS B79: the slots that NVMe needs are part of the account."""
    wanted = request(model(decoders=16))
    placement = place(wanted, squeezed(wanted, 60 << 20))
    assert {"state staging slots"} <= {term.name for term in placement.terms}


def test_a_run_says_in_a_line_where_its_bytes_live() -> None:
    wanted = request(model(decoders=16))
    assert summary(place(wanted, ROOMY)).endswith("; 2 sequences at a time")
    text = summary(place(wanted, squeezed(wanted, 60 << 20)))
    assert "NVMe 40.23 MiB; state of" in text and "layers on NVMe" in text
    assert "gradients of 18 layers held on the device" in text
    kept = replace(request(model(decoders=6)), processes=GPU, kept_layers=None)
    assert "activations of all 6 layers kept;" in summary(place(kept, ROOMY))
    assert "activations of 5 layers kept, the others recomputed" in summary(place(replace(kept, kept_layers=5), ROOMY))
    assert "activations of 1 layer kept, the" in summary(place(replace(kept, kept_layers=1), ROOMY))


def test_a_drive_too_small_for_one_more_layers_state_takes_the_weights_of_a_few() -> None:
    wanted = request(model(decoders=16), slots=1)
    # A little less RAM than some number of layers on NVMe needs, and not enough of the drive for one layer more.
    budget = squeezed(wanted, 60 << 20)
    budget = replace(budget, ram_bytes=place(wanted, budget).arena_bytes - (2 << 20))
    budget = replace(budget, nvme_bytes=place(wanted, budget).used(Place.NVME) - (3 << 20))
    placement = place(wanted, budget)
    assert any(home.weight_slot is not None for home in placement.tier.homes)
    assert any(home.state_slot is None for home in placement.tier.homes)


GPU = ProcessShape(optimizer_actors=2, cuda=True)


def test_spare_device_memory_goes_to_updates_then_to_layers_that_are_not_recomputed() -> None:
    base = replace(request(model()), processes=GPU)
    least = place(replace(base, device_updates=False), ROOMY).used(Place.DEVICE)
    with_updates = place(base, ROOMY)
    assert with_updates.schedule.device_updates == tuple(range(9))
    assert with_updates.schedule.decoder_slots == 8
    on_host = place(replace(base, device_updates=False), ROOMY)
    never_leave = sum(base.model.layers[index].numel for index in range(9))
    assert on_host.arena_bytes - with_updates.arena_bytes == 2 * never_leave
    greedy = replace(base, kept_layers=None)
    assert place(greedy, ROOMY).schedule.kept_layers == 8
    seen: list[tuple[int, int]] = []
    for gpu_bytes in range(least, place(greedy, ROOMY).used(Place.DEVICE) + 1, 1 << 17):
        found = place(greedy, replace(ROOMY, gpu_bytes=gpu_bytes))
        assert found.used(Place.DEVICE) <= gpu_bytes
        seen.append((len(found.schedule.device_updates), found.schedule.kept_layers))
    assert seen[0] == (0, 0) and seen[-1][1] >= 7
    assert any(updates and not kept for updates, kept in seen)


def test_lent_state_uses_the_room_of_boundary_activations_where_the_device_has_no_other() -> None:
    """7B on 24 GiB: without that no layer could be updated there."""
    base = replace(request(model(decoders=16)), processes=GPU, kept_layers=0)
    roomy = place(base, ROOMY)
    assert roomy.schedule.in_lent_room == 0, "the next forward waits for nothing"
    tight = place(base, replace(ROOMY, gpu_bytes=roomy.used(Place.DEVICE) - 1))
    assert tight.schedule.device_updates == roomy.schedule.device_updates
    assert 0 < tight.schedule.in_lent_room <= (len(base.model.layers) - 2) // 2


def test_only_state_at_home_in_ram_is_lent_and_only_where_clipping_makes_the_next_step_wait() -> None:
    base = replace(request(model()), processes=GPU)
    assert place(replace(base, clip=False), ROOMY).schedule.device_updates == ()
    assert place(replace(base, processes=PROCESSES), ROOMY).schedule.device_updates == ()
    squeezed_ram = squeezed(replace(base, device_updates=False), 20 << 20)
    found = place(base, without_room_for_gradients(base, squeezed_ram))
    assert all(found.tier.homes[layer].state_slot is None for layer in found.schedule.device_updates)


def test_one_long_sequence_passes_its_networks_in_chunks_where_the_device_has_no_room_for_them_whole() -> None:
    long = StepShape(sequence_length=1 << 17, sequences=1, micro_batch=1)
    wanted = replace(request(model()), compute=replace(COMPUTE, intermediate_size=4096), step=long)
    whole = place(replace(wanted, mlp_chunk_tokens=0), ROOMY)
    assert place(wanted, ROOMY).mlp_chunk_tokens == 0, "roomy devices change no bit"
    work_bytes = next(term.num_bytes for term in whole.terms if term.name == "layer at work")
    tight = replace(ROOMY, gpu_bytes=whole.used(Place.DEVICE) - work_bytes // 2)
    with pytest.raises(PlacementError, match="device memory"):
        place(replace(wanted, mlp_chunk_tokens=0), tight)
    chunked = place(wanted, tight)
    assert chunked.mlp_chunk_tokens == 16384
    assert chunked.spilled_boundaries == 0
    assert "in chunks of 16,384 tokens" in summary(chunked)
    assert place(replace(wanted, mlp_chunk_tokens=3000), ROOMY).mlp_chunk_tokens == 3000
