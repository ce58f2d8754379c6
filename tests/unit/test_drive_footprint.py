"""What the plan counts of the drive is what a filesystem takes for a run's files, folders and metadata included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.memory.drive_footprint import BLOCK_BYTES, drive_bytes, drive_terms
from pipeline.memory.footprint import total
from pipeline.memory.homes import homes
from tiers.arena_map import TierPlan
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
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
from tiers.scratch import Scratch, bytes_on_disk, nvme_buffers, scratch_bytes
from tiers.shard_store import ShardStore

DECODERS = 6


def plan_of(state: Sequence[int], weights: Sequence[int], precision: Precision) -> TierPlan:
    def layer(index: int, kind: LayerKind, numel: int) -> LayerLayout:
        tensors, padded = place_tensors([TensorSpec(f"{index}.weight", (numel,), 0, True, InitKind.NORMAL)])
        return LayerLayout(index, f"layer-{index}", kind, tensors, padded)

    kinds = [LayerKind.EMBEDDING, *[LayerKind.DECODER] * DECODERS, LayerKind.HEAD]
    layers = tuple(layer(index, kind, 9_000_001 if index == 2 else 70_001) for index, kind in enumerate(kinds))
    model = ModelLayout(layers, precision, tied=False)
    placed = homes(model, clip=True, state=state, weights=weights, staging_slots=2)
    return TierPlan(model, placed, ElementType.BFLOAT16 if precision is Precision.BF16 else ElementType.FLOAT32)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(("state", "weights"), [([2], []), ([1, 2, 5], [2]), (range(8), range(8))])
def test_no_file_of_a_run_takes_more_of_the_drive_than_is_counted(
    state: Sequence[int], weights: Sequence[int], precision: Precision, tmp_path: Path
) -> None:
    plan = plan_of(state, weights, precision)
    scratch = Scratch(tmp_path)
    try:
        with DirectIO(1) as io:
            store = ShardStore(scratch.path, plan.model, io, DirectMode.BUFFERED)
            store.create_root()
            for layer in plan.model.layers:
                if buffers := nvme_buffers(plan, layer.index):
                    store.create_layer(layer, buffers)
        taken = bytes_on_disk(tmp_path)
        files = sum(path.is_file() for path in tmp_path.rglob("*"))
    finally:
        scratch.close()
    counted = drive_bytes(plan)
    assert taken <= counted, "files are whole blocks, and have folders and metadata"
    assert counted <= scratch_bytes(plan) + 4 * BLOCK_BYTES * files
    assert total(drive_terms(plan)) == counted


def test_without_anything_on_nvme_the_drive_has_nothing() -> None:
    assert drive_bytes(plan_of([], [], Precision.BF16)) == 0 == total(drive_terms(plan_of([], [], Precision.BF16)))
