"""Geometry of a shard: one buffer of one layer as one zarr v3 shard file. Pure arithmetic and naming, no I/O.

A file is its chunks one after another, then the index of zarr's `sharding_indexed` codec (offset and bytes of each
chunk as little-endian uint64) and the crc32c of that index. Chunks are whole pages, so that the data region moves
between disk and arena without a copy; what that rounds up is zeros at the end of the last chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tiers.checksum import crc32c, joined_crc32c
from tiers.direct_io import MAX_BLOCK_BYTES
from tiers.errors import ShardError
from tiers.layout import PAGE_BYTES, Buffer, ElementType, LayerLayout, ModelLayout, buffer_types, stored_buffers

_ABSENT = (1 << 64) - 1
"""Offset and bytes of a chunk that was never written; zarr reads it as zeros in silence."""
_INDEX_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file."""

    path: str
    """Relative to the store's directory, with `/`."""
    num_bytes: int
    crc32c: int
    """Of the whole file."""
    chunk_bytes: int = 0
    """Of a shard: its data region is checked in pieces of this size. Zero for other files."""
    chunk_crc32c: tuple[int, ...] = ()
    """Of a shard: one a chunk as it is stored, so that a damaged chunk can be named and chunks are checked as they
    stream."""
    stored_bytes: tuple[int, ...] = ()
    """Of a compressed shard: bytes of each chunk on disk, where `chunk_bytes` counts them in memory."""


class TensorSpan(NamedTuple):
    """Where a tensor lies among the elements of a shard."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class ShardGeometry:
    """Sizes of one shard file."""

    numel: int
    """Elements of the buffer: the shape of the zarr array."""
    element: ElementType
    chunk_numel: int
    num_chunks: int

    @classmethod
    def of(cls, numel: int, element: ElementType) -> ShardGeometry:
        """Cut `numel` elements (whole pages) in equal chunks of at most 16 MiB; less than a page a chunk is padding."""
        assert (numel * element.bytes) % PAGE_BYTES == 0
        num_pages = numel * element.bytes // PAGE_BYTES
        fewest = -(-num_pages * PAGE_BYTES // MAX_BLOCK_BYTES)
        pages_a_chunk = -(-num_pages // fewest)
        return cls(numel, element, pages_a_chunk * PAGE_BYTES // element.bytes, -(-num_pages // pages_a_chunk))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, whole pages."""
        return self.chunk_numel * self.element.bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of all chunks: where the index begins."""
        return self.num_chunks * self.chunk_bytes

    @property
    def padding_bytes(self) -> int:
        """Zeros after the last element, in the last chunk."""
        return self.data_bytes - self.numel * self.element.bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.data_bytes + 16 * self.num_chunks + _INDEX_CRC_BYTES

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this project puts each chunk."""
        return tuple(range(0, self.data_bytes, self.chunk_bytes))

    def index(self) -> bytes:
        """The end of the file: the index of the chunks at `offsets`, and its crc32c."""
        return index_of([self.chunk_bytes] * self.num_chunks)

    def record(self, path: str, block_crc32c: Sequence[int]) -> FileRecord:
        """The record of a file whose chunks, without the padding of the last, have these checksums."""
        last = crc32c(bytes(self.padding_bytes), block_crc32c[-1])
        chunks = (*block_crc32c[:-1], last)
        index = self.index()
        pieces = [*((crc, self.chunk_bytes) for crc in chunks), (crc32c(index), len(index))]
        return FileRecord(path, self.file_bytes, joined_crc32c(pieces), self.chunk_bytes, chunks)


def index_of(stored_bytes: Sequence[int]) -> bytes:
    """The index of chunks of these sizes that lie one after another from the start of the file, and its crc32c."""
    ends = np.cumsum(stored_bytes, dtype="<u8")
    entries = np.stack([ends - np.array(stored_bytes, "<u8"), np.array(stored_bytes, "<u8")], axis=1).tobytes()
    return entries + crc32c(entries).to_bytes(_INDEX_CRC_BYTES, "little")


def parse_index(index: bytes, num_chunks: int, chunk_bytes: int, label: ShardLabel) -> tuple[int, ...]:
    """Offsets of all chunks from the end of a shard file.

    Raises:
        ShardError: The index is damaged, or a chunk is absent or of another size; file, chunk and tensors are named.
    """
    entries, crc = index[:-_INDEX_CRC_BYTES], index[-_INDEX_CRC_BYTES:]
    if len(entries) != 16 * num_chunks or crc32c(entries) != int.from_bytes(crc, "little"):
        raise ShardError(f"{label.path}: the chunk index at its end is damaged; use an earlier checkpoint")
    offsets = []
    for number, (offset, num_bytes) in enumerate(np.frombuffer(entries, "<u8").reshape(-1, 2).tolist()):
        if offset == _ABSENT:
            raise ShardError(
                f"{label.chunk(number)} was never written (zarr would read zeros); use an earlier checkpoint"
            )
        if num_bytes != chunk_bytes or offset % PAGE_BYTES:
            raise ShardError(
                f"{label.chunk(number)} has {num_bytes} bytes at {offset}; expected {chunk_bytes} at a page boundary: "
                "it was written with other codecs"
            )
        offsets.append(offset)
    return tuple(offsets)


@dataclass(frozen=True, slots=True)
class ShardLabel:
    """Names a shard's chunks by file and tensors in messages."""

    path: str
    spans: tuple[TensorSpan, ...]
    chunk_numel: int

    def chunk(self, number: int) -> str:
        """A chunk's number, file and the tensors that lie in it."""
        start = number * self.chunk_numel
        stop = start + self.chunk_numel
        names = [span.name for span in self.spans if span.offset < stop and span.offset + span.numel > start]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"chunk {number} of {self.path} (tensors: {', '.join(names[:3]) or 'none'}{more})"


def tensor_spans(layer: LayerLayout) -> tuple[TensorSpan, ...]:
    """Where each tensor of a layer lies."""
    return tuple(TensorSpan(tensor.name, tensor.offset, tensor.numel) for tensor in layer.tensors)


def shard_path(layer: LayerLayout, buffer: Buffer) -> str:
    """Path of a shard in its store: zarr's default chunk key of the array's only shard."""
    return f"{layer.name}/{buffer}/c/0"


def store_bytes(model: ModelLayout) -> int:
    """Bytes of the shards of a whole checkpoint."""
    types = buffer_types(model.precision)
    return sum(
        ShardGeometry.of(layer.numel, types[buffer]).file_bytes
        for layer in model.layers
        for buffer in stored_buffers(model.precision)
    )
