"""Small models and page-aligned memory for tests of stores, checkpoints and the prefetcher."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.layout import (
    Buffer,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    buffer_types,
    place_tensors,
    stored_buffers,
)
from tiers.manifest import Facts, SavedPosition
from tiers.shard_store import ShardStore, StorageArray
from tiers.shards import FileRecord


def layer_layout(index: int, name: str, kind: LayerKind, rows: int) -> LayerLayout:
    """A layer of three tensors, of which the first has rows * 64 elements."""
    tensors, numel = place_tensors(
        [
            TensorSpec(f"model.{name}.matrix", (rows, 64), 0, True, InitKind.NORMAL, 0.02),
            TensorSpec(f"model.{name}.bias", (100,), 0, False, InitKind.ZEROS),
            TensorSpec(f"model.{name}.norm", (64,), 0, False, InitKind.ONES),
        ]
    )
    return LayerLayout(index, name, kind, tensors, numel)


def small_model(precision: Precision = Precision.BF16, rows: int = 100, layers: int = 2) -> ModelLayout:
    """An embedding, `layers` decoder layers and a head."""
    return ModelLayout(
        (
            layer_layout(0, "embedding", LayerKind.EMBEDDING, 2 * rows),
            *(layer_layout(i + 1, f"layer-{i:04}", LayerKind.DECODER, rows) for i in range(layers)),
            layer_layout(layers + 1, "head", LayerKind.HEAD, 2 * rows),
        ),
        precision,
        tied=False,
    )


def page_aligned(numel: int, storage: str) -> StorageArray:
    """Zeroed memory that starts at a page."""
    return np.frombuffer(mmap.mmap(-1, numel * np.dtype(storage).itemsize), storage)


def random_arrays(model: ModelLayout, layer: LayerLayout, seed: int) -> dict[Buffer, StorageArray]:
    """Random bits, every NaN payload among them, for each stored buffer; the first page of each is zeros."""
    rng, arrays = np.random.default_rng(seed), {}
    for buffer in stored_buffers(model.precision):
        array = page_aligned(layer.numel, buffer_types(model.precision)[buffer].storage)
        array.view(np.uint8)[4096:] = rng.integers(0, 256, array.nbytes - 4096, dtype=np.uint8)
        arrays[buffer] = array
    return arrays


def empty_arrays(model: ModelLayout, layer: LayerLayout) -> dict[Buffer, StorageArray]:
    """Memory for each stored buffer."""
    types = buffer_types(model.precision)
    return {buffer: page_aligned(layer.numel, types[buffer].storage) for buffer in stored_buffers(model.precision)}


def write_layer(store: ShardStore, layer: LayerLayout, arrays: dict[Buffer, StorageArray]) -> tuple[FileRecord, ...]:
    """Create and write all buffers of a layer durably."""
    return store.create_layer(layer, arrays) + store.write(layer, arrays, sync=True)


def write_store(directory: Path, model: ModelLayout, io: DirectIO, seed: int) -> tuple[FileRecord, ...]:
    """A whole store of random bits; each layer's seed is `seed` plus its index."""
    store = ShardStore(directory, model, io, DirectMode.DIRECT)
    records = [store.create_root()]
    for layer in model.layers:
        records += write_layer(store, layer, random_arrays(model, layer, seed + layer.index))
    return tuple(records)


def same_bits(left: dict[Buffer, StorageArray], right: dict[Buffer, StorageArray]) -> bool:
    """Whether all buffers are equal bit by bit."""
    return left.keys() == right.keys() and all(
        np.array_equal(left[b].view(np.uint8), right[b].view(np.uint8)) for b in left
    )


def saved_facts(model: ModelLayout, step: int) -> Facts:
    """Facts of a run of `model` after `step` steps."""
    return Facts(
        step=step,
        applied_steps=step,
        skipped_steps=0,
        data_position=SavedPosition(epoch=0, sequence=4 * step),
        seed=1,
        recipe="[run]\nname = 'test'\n",
        libraries={"zarr": "3"},
        precision=model.precision,
        num_parameters=model.num_parameters,
    )
