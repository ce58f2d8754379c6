"""A Hugging Face safetensors directory as a source of layers: all of it checked first, then read into the arena.

Strict on purpose: a tensor that is missing, unknown or of another shape is an error before anything is loaded. Nothing
is ever left uninitialised or initialised at random instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tiers.arena import Arena
from tiers.arena_map import ArenaMap
from tiers.direct_file import fault
from tiers.errors import ImportedTensorError, ShardError
from tiers.layout import LayerKind, LayerLayout, ModelLayout, TensorSpec
from tiers.master import Float32Array, LayerState, bfloat16_to_float32
from tiers.safetensors_directory import listed, read_directory
from tiers.safetensors_header import StoredTensor

BLOCK_ELEMENTS = 2 * 2**20
"""Elements converted at once: at most 20 MiB, what is read and temporaries, whatever the tensor. The Prefetcher reads
6 layers at once, and the plan's account of the tier's actors has some 180 MiB for that."""

STORED_TYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

TIED_HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)


class SafetensorsSource:
    """Tensors of a model on disk, known to be complete. Holds no file open; pickles."""

    def __init__(self, directory: Path, model: ModelLayout) -> None:
        """Check every file and tensor of `directory` against `model`.

        Raises:
            ShardError: A file is missing, damaged or not safetensors.
            ImportedTensorError: A tensor is missing, unknown, or of another shape or type than the model needs.
        """
        self._directory = directory
        self._model = model
        self._stored = read_directory(directory)
        specs = {tensor.name: tensor for layer in model.layers for tensor in layer.tensors}
        self._refuse_missing(specs)
        self._refuse_unknown(specs)
        for name, spec in specs.items():
            self._refuse_mismatch(spec, self._stored[name])

    def read_layer_into(self, arena: Arena, arena_map: ArenaMap, layer: LayerLayout) -> None:
        """Write the layer's master, zero moments and zero padding to where the layer is updated.

        A bf16 source becomes the high half with a zero low half; f16 and f32 sources keep every bit in the master.

        Raises:
            ShardError: A file shrank after it was checked, or its disk fails.
        """
        state = LayerState.of(arena, arena_map, layer)
        state.clear_padding()
        state.clear_moments()
        for tensor in layer.tensors:
            offset = tensor.offset
            for block in _read_blocks(self._stored[tensor.name]):
                if block.dtype == np.uint16:
                    state.write_bfloat16(offset, block)
                else:
                    state.write_float32(offset, _as_float32(block))
                offset += block.size
        if layer.kind is LayerKind.EMBEDDING and self._model.tied:
            self._warn_of_differing_head(layer.tensors[0])

    def _refuse_missing(self, specs: dict[str, TensorSpec]) -> None:
        missing = [name for name in specs if name not in self._stored]
        if missing:
            raise ImportedTensorError(
                f"{self._directory} lacks {len(missing)} of the model's {len(specs)} tensors: {listed(missing)}; "
                "the files must belong to this config.json and be complete"
            )

    def _refuse_unknown(self, specs: dict[str, TensorSpec]) -> None:
        unknown = [name for name in self._stored if name not in specs and not self._may_ignore(name)]
        if unknown:
            raise ImportedTensorError(
                f"{self._directory} holds {len(unknown)} tensors that the model of its config.json does not have: "
                f"{listed(unknown)}; training would drop them"
            )

    def _may_ignore(self, name: str) -> bool:
        # Old files hold the rotary frequencies, which are computed from the config; a tied head is the embedding.
        return name.endswith(".rotary_emb.inv_freq") or (self._model.tied and name == TIED_HEAD)

    def _refuse_mismatch(self, spec: TensorSpec, stored: StoredTensor) -> None:
        where = f"tensor {spec.name} of {stored.path}"
        if stored.shape != spec.shape:
            raise ImportedTensorError(
                f"{where} has the shape {list(stored.shape)}, config.json asks for {list(spec.shape)}"
                + _vocabulary_hint(spec, stored)
            )
        if stored.dtype not in STORED_TYPES:
            raise ImportedTensorError(
                f"{where} is {stored.dtype}, read are {', '.join(STORED_TYPES)}; convert a quantised model back first"
            )

    def _warn_of_differing_head(self, embedding: TensorSpec) -> None:
        head, stored = self._stored.get(TIED_HEAD), self._stored[embedding.name]
        if head is None:
            return
        same = head.shape == stored.shape and head.dtype in STORED_TYPES
        if same:
            pairs = zip(_read_blocks(head), _read_blocks(stored), strict=True)
            same = all(
                np.array_equal(_as_float32(one).view(np.int32), _as_float32(two).view(np.int32)) for one, two in pairs
            )
        if not same:
            logger.warning(
                "%s holds a %s that differs from %s, to which it is tied: the embedding is used, the head dropped",
                self._directory,
                TIED_HEAD,
                embedding.name,
            )


def _vocabulary_hint(spec: TensorSpec, stored: StoredTensor) -> str:
    same_width = len(spec.shape) == len(stored.shape) == 2 and spec.shape[1] == stored.shape[1]
    if not same_width or not ("embed" in spec.name or "lm_head" in spec.name):
        return ""
    return f"; if the file is right, set vocab_size to {stored.shape[0]} (padding beyond the tokenizer's size is kept)"


def _as_float32(values: npt.NDArray[Any]) -> Float32Array:
    return bfloat16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32, copy=False)


def _read_blocks(stored: StoredTensor) -> Iterator[npt.NDArray[Any]]:
    """Yield the tensor's elements in order, uint16 for bfloat16. A block is valid until the next is asked for."""
    element = STORED_TYPES[stored.dtype]
    numel = stored.num_bytes // element.itemsize
    block = np.empty(min(BLOCK_ELEMENTS, numel), element)
    try:
        file = stored.path.open("rb", buffering=0)
    except OSError as error:
        raise fault("open", stored.path, error, 0, 0) from error
    with file:
        for start in range(0, numel, BLOCK_ELEMENTS):
            part = block[: min(BLOCK_ELEMENTS, numel - start)]
            _read_exactly(file, part.view(np.uint8).data, stored, stored.offset_bytes + start * element.itemsize)
            yield part


def _read_exactly(file: BinaryIO, target: memoryview, stored: StoredTensor, offset_bytes: int) -> None:
    done = 0
    while done < len(target):
        try:
            got = os.preadv(file.fileno(), [target[done:]], offset_bytes + done)
        except OSError as error:
            raise fault("read", stored.path, error, offset_bytes + done, len(target) - done) from error
        if got == 0:
            raise ShardError(
                f"{stored.path} ended while tensor {stored.name} was read: it changed after it was checked"
            )
        done += got
