"""Host memory that updates on the device spare counts before a budget is called too small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.memory.footprint import MIB, Place
from pipeline.memory.least import amount, least_of
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest, Shortage
from pipeline.memory.placement_search import solve
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from tiers.layout import (
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
EVERYTHING = MemoryBudget(ram_bytes=2**50, gpu_bytes=2**50, nvme_bytes=0)


def request(vocab: int, *, tied: bool, decoders: int = 10) -> PlacementRequest:
    def layer(index: int, kind: LayerKind, numel: int) -> LayerLayout:
        tensors, padded = place_tensors([TensorSpec(f"{index}.weight", (numel,), 0, True, InitKind.NORMAL)])
        return LayerLayout(index, f"layer-{index}", kind, tensors, padded)

    layers = [layer(0, LayerKind.EMBEDDING, vocab)]
    layers += [layer(index + 1, LayerKind.DECODER, (1 << 20) + 5) for index in range(decoders)]
    layers.append(layer(decoders + 1, LayerKind.HEAD, 64 if tied else vocab))
    return PlacementRequest(
        ModelLayout(tuple(layers), Precision.BF16, tied),
        COMPUTE,
        StepShape(sequence_length=128, sequences=8, micro_batch=2),
        clip=True,
        processes=ProcessShape(optimizer_actors=2, cuda=True),
        kept_layers=0,
    )


def budgets(wanted: PlacementRequest) -> list[MemoryBudget]:
    """From a device with no room for anything but the work, to one that holds every gradient and updates layers."""
    least = least_of(replace(wanted, device_updates=False), replace(EVERYTHING, gpu_bytes=0), Place.DEVICE)
    assert least is not None
    lent = wanted.model.num_parameters * 12
    return [replace(EVERYTHING, gpu_bytes=least.used(Place.DEVICE) + lent * part // 4) for part in range(8)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [1 << 18, 5 << 18, 8 << 20], ids=["small", "as a layer", "large"])
@pytest.mark.parametrize("nvme_bytes", [0, 2**50])
def test_every_budget_from_the_least_on_is_enough_and_none_below_it(vocab: int, tied: bool, nvme_bytes: int) -> None:
    wanted = request(vocab, tied=tied)
    updated = set()
    for budget in budgets(wanted):
        budget = replace(budget, nvme_bytes=nvme_bytes)
        least = least_of(wanted, replace(budget, ram_bytes=0), Place.RAM)
        assert least is not None
        updated.add(len(least.schedule.device_updates))
        for more in (0, 1, 3 * MIB, 20 * MIB):
            found = solve(wanted, replace(budget, ram_bytes=least.arena_bytes + more))
            assert isinstance(found, Placement)
            assert found.arena_bytes <= least.arena_bytes + more
            assert found.used(Place.DEVICE) <= budget.gpu_bytes
        short = solve(wanted, replace(budget, ram_bytes=least.arena_bytes - max(MIB, least.arena_bytes >> 7)))
        assert isinstance(short, Shortage) and short.place is Place.RAM
        assert short.needed_bytes >= least.arena_bytes - max(MIB, least.arena_bytes >> 7)
    # With a drive the least has all state there, and so nothing to lend.
    assert len(updated) > 2 or nvme_bytes, "the budgets are of every kind"


def test_what_the_search_counts_is_what_the_arena_takes() -> None:
    """To the byte: a budget of one byte less takes another way, or none."""
    wanted = request(8 << 20, tied=True)
    for gradients in (None, ElementType.FLOAT32):
        asked = replace(wanted, gradient_type=gradients)
        for budget in budgets(asked)[::2]:
            found = solve(asked, budget)
            assert isinstance(found, Placement)
            exact = solve(asked, replace(budget, ram_bytes=found.arena_bytes))
            assert isinstance(exact, Placement) and exact.arena_bytes == found.arena_bytes
            less = solve(asked, replace(budget, ram_bytes=found.arena_bytes - 1))
            assert isinstance(less, Shortage) or less.arena_bytes < amount(found, Place.RAM)
