"""Shards compressed at rest: zstd with byte shuffle, as zarr v3's `blosc` codec, so that plain zarr reads them.

For checkpoints that a recipe asks to be small, never for the hot path. One chunk at a time is in memory besides what
the caller holds; the page cache is given back. Layers in parallel are the caller's: compression leaves Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numcodecs.blosc import SHUFFLE, Blosc

from tiers.checksum import crc32c, joined_crc32c
from tiers.direct_file import fault
from tiers.durable_files import FILE_MODE, make_directory
from tiers.errors import ShardError
from tiers.layout import Buffer, LayerLayout, ModelLayout, buffer_types
from tiers.shard_store import Lend, Records, ShardStore, StorageArray, write_metadata
from tiers.shards import FileRecord, ShardGeometry, ShardLabel, index_of, shard_path, tensor_spans
from tiers.store_metadata import ZSTD_LEVEL, Compression, check_layer_metadata, layer_metadata


class CompressedStore:
    """The shards of `model` under `directory`, compressed. Thread-safe for different layers; files have mode 0600."""

    def __init__(self, directory: Path, model: ModelLayout) -> None:
        self.directory = directory
        self._model = model
        # Blosc's own threads only serve the main thread of a process, which actors do not call from.
        self._codec = Blosc(cname="zstd", clevel=ZSTD_LEVEL, shuffle=SHUFFLE)

    def create_layer(self, layer: LayerLayout, buffers: Iterable[Buffer]) -> tuple[FileRecord, ...]:
        """Write a layer's metadata; return its records. Raises ShardError where the disk refuses."""
        files = layer_metadata(layer, self._model.precision, buffers, Compression.ZSTD)
        return tuple(write_metadata(self.directory, file) for file in files)

    def write(
        self, layer: LayerLayout, arrays: Mapping[Buffer, StorageArray], lend: Lend | None = None
    ) -> tuple[FileRecord, ...]:
        """Write buffers of a layer from memory [layer.numel], durably.

        Args:
            layer: Whose.
            arrays: Memory of each buffer, [layer.numel].
            lend: Where the chunks lie, if `arrays` may change meanwhile.

        Returns:
            A record of each shard.

        Raises:
            ShardError: The disk is full or refuses.
        """
        written = []
        for buffer, array in arrays.items():
            numel = self._geometry(layer, buffer).chunk_numel
            pieces = _pieces(array, numel) if lend is None else _lent_pieces(lend, buffer, array, numel)
            written.append(self._write(layer, buffer, pieces))
        return tuple(written)

    def copy_from(
        self, source: ShardStore, layer: LayerLayout, buffers: Iterable[Buffer], records: Records
    ) -> tuple[FileRecord, ...]:
        """Likewise from the shards of `source`, checked against `records` on the way.

        Raises:
            ShardError: As `write`, and as `ShardStore.read` for the source.
        """
        return tuple(self._write(layer, buffer, source.chunks(layer, buffer, records)) for buffer in buffers)

    def read(self, layer: LayerLayout, arrays: Mapping[Buffer, StorageArray], records: Records) -> None:
        """Fill the memory of buffers, [layer.numel] each; undefined after an error.

        Raises:
            ShardError: A shard is missing, truncated, or has another checksum; file, chunk and tensors are named.
        """
        for buffer, array in arrays.items():
            record, path = records.get(shard_path(layer, buffer)), self.directory / shard_path(layer, buffer)
            geometry = self._geometry(layer, buffer)
            if record is None or len(record.stored_bytes) != geometry.num_chunks:
                raise ShardError(f"{path} has no record of its {geometry.num_chunks} chunks: it is of another model")
            chunks = read_stored(path, record, self._label(layer, buffer))
            for target, stored in zip(_pieces(array, geometry.chunk_numel), chunks, strict=True):
                if target.size == geometry.chunk_numel:
                    self._codec.decode(stored, out=target)
                else:  # the last one is padded on disk
                    whole = np.frombuffer(self._codec.decode(stored), array.dtype)
                    target[:] = whole[: target.size]

    def check_layer(self, layer: LayerLayout, buffers: Iterable[Buffer]) -> None:
        """Raise ShardError where the stored layout of `layer` is not the model's."""
        check_layer_metadata(self.directory, layer, self._model.precision, buffers, Compression.ZSTD)

    def _geometry(self, layer: LayerLayout, buffer: Buffer) -> ShardGeometry:
        return ShardGeometry.of(layer.numel, buffer_types(self._model.precision)[buffer])

    def _label(self, layer: LayerLayout, buffer: Buffer) -> ShardLabel:
        path = str(self.directory / shard_path(layer, buffer))
        return ShardLabel(path, tensor_spans(layer), self._geometry(layer, buffer).chunk_numel)

    def _write(self, layer: LayerLayout, buffer: Buffer, pieces: Iterator[StorageArray]) -> FileRecord:
        """Write one shard from its elements, chunk by chunk; a short last chunk is padded with zeros."""
        geometry, name = self._geometry(layer, buffer), shard_path(layer, buffer)
        path, sums, sizes = self.directory / name, list[int](), list[int]()
        try:
            make_directory(path.parent)
            descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    short = geometry.chunk_numel - piece.size
                    stored = self._codec.encode(np.pad(piece, (0, short)) if short else piece)
                    file.write(stored)
                    sums.append(crc32c(bytes(stored)))
                    sizes.append(len(stored))
                index = index_of(sizes)
                file.write(index)
                file.flush()
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise fault("write", path, error, sum(sizes), geometry.file_bytes) from error
        whole = joined_crc32c([*zip(sums, sizes, strict=True), (crc32c(index), len(index))])
        return FileRecord(name, sum(sizes) + len(index), whole, geometry.chunk_bytes, tuple(sums), tuple(sizes))


def read_stored(path: Path, record: FileRecord, label: ShardLabel) -> Iterator[bytes]:
    """Yield the compressed chunks of a shard, each checked.

    Raises:
        ShardError: The file is missing, truncated, or damaged; chunk and tensors are named.
    """
    try:
        with path.open("rb") as file:
            for number, (num_bytes, wanted) in enumerate(zip(record.stored_bytes, record.chunk_crc32c, strict=True)):
                stored = file.read(num_bytes)
                if crc32c(stored) != wanted:
                    raise ShardError(
                        f"{label.chunk(number)} has another crc32c than when it was written; use an earlier "
                        "checkpoint, and check the drive"
                    )
                yield stored
            if file.read() != index_of(record.stored_bytes):
                raise ShardError(f"{path}: the chunk index at its end is damaged; use an earlier checkpoint")
    except OSError as error:
        raise fault("read", path, error, 0, record.num_bytes) from error


def _pieces(array: StorageArray, numel: int) -> Iterator[StorageArray]:
    return (array[start : start + numel] for start in range(0, array.size, numel))


def _lent_pieces(lend: Lend, buffer: Buffer, array: StorageArray, numel: int) -> Iterator[StorageArray]:
    """Likewise, each lent until the next is asked for."""
    for number in range(-(-array.size // numel)):
        with lend(buffer, number) as memory:
            yield memory.view(array.dtype)
