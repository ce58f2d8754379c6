"""Shard files of one store between disk and memory: the scratch of a run, or a checkpoint.

The memory is the caller's (arena extents); nothing here keeps a reference to it. What is read is checked against the
record made when it was written: size, chunk index, crc32c of every chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.bounce_blocks import anonymous_memory
from tiers.checksum import ByteArray, crc32c
from tiers.direct_file import DirectMode, fault, preallocate
from tiers.direct_io import DirectIO, FileBlocks
from tiers.durable_files import make_directory, write_file
from tiers.errors import ShardError
from tiers.layout import Buffer, LayerLayout, ModelLayout, buffer_types
from tiers.shards import FileRecord, ShardGeometry, ShardLabel, parse_index, shard_path, tensor_spans
from tiers.store_metadata import MetadataFile, check_layer_metadata, layer_metadata, root_metadata

StorageArray = npt.NDArray[Any]
"""A page-aligned 1-D array of a buffer's storage type; the element type varies by buffer."""
Records = Mapping[str, FileRecord]
"""By path in the store."""
Lend = Callable[[Buffer, int], AbstractContextManager[ByteArray]]
"""Gives the bytes of a buffer's chunk, by its number, while it is written, without the padding of the last."""


class ShardStore:
    """The shards of `model` under `directory`. Thread-safe for different layers; files have mode 0600."""

    def __init__(self, directory: Path, model: ModelLayout, io: DirectIO, mode: DirectMode) -> None:
        self.directory = directory
        self._model = model
        self._io = io
        self._mode = mode

    def create_root(self) -> FileRecord:
        """Write the root group."""
        return write_metadata(self.directory, root_metadata(self._model))

    def create_layer(self, layer: LayerLayout, buffers: Iterable[Buffer]) -> tuple[FileRecord, ...]:
        """Write a layer's metadata and reserve its shards on disk, so that a full disk shows before any data moves.

        Returns:
            Records of the metadata files; those of the shards come from `write`.

        Raises:
            ShardError: The disk is full or refuses.
        """
        buffers = tuple(buffers)
        records = [
            write_metadata(self.directory, file) for file in layer_metadata(layer, self._model.precision, buffers)
        ]
        for buffer in buffers:
            geometry, path = self._geometry(layer, buffer), self.directory / shard_path(layer, buffer)
            try:
                make_directory(path.parent)
            except OSError as error:
                raise fault("creation", path.parent, error, 0, 0) from error
            preallocate(path, geometry.file_bytes)
            _write_index(path, geometry)
        return tuple(records)

    def write(
        self, layer: LayerLayout, arrays: Mapping[Buffer, StorageArray], *, sync: bool, lend: Lend | None = None
    ) -> tuple[FileRecord, ...]:
        """Write buffers of a layer over the shards that `create_layer` made.

        Args:
            layer: Whose.
            arrays: Memory of each buffer, [layer.numel], page-aligned, unchanged until this returns.
            sync: Whether the files must outlive a crash.
            lend: Where the chunks lie, if `arrays` may change meanwhile.

        Returns:
            A record of each shard.

        Raises:
            ShardError: The disk is full, or another writer or reader has a shard.
        """
        files = [
            self._blocks(
                layer, buffer, array, self._geometry(layer, buffer).offsets, partial(lend, buffer) if lend else None
            )
            for buffer, array in arrays.items()
        ]
        sums = self._io.write(files, sync=sync)
        return tuple(
            self._geometry(layer, buffer).record(shard_path(layer, buffer), crcs)
            for buffer, crcs in zip(arrays, sums, strict=True)
        )

    def read(self, layer: LayerLayout, arrays: Mapping[Buffer, StorageArray], records: Records) -> None:
        """Fill the memory of buffers from their shards.

        Args:
            layer: Whose.
            arrays: Memory of each buffer, [layer.numel], page-aligned; undefined after an error.
            records: What the manifest says of the shards.

        Raises:
            ShardError: A shard is missing, truncated, has an absent chunk or another checksum; file, chunk and
                tensors are named.
        """
        files = [
            self._blocks(layer, buffer, array, self._offsets(layer, buffer, records))
            for buffer, array in arrays.items()
        ]
        for buffer, crcs in zip(arrays, self._io.read(files), strict=True):
            self._compare(layer, buffer, crcs, records)

    def copy_from(
        self, source: ShardStore, layer: LayerLayout, buffers: Iterable[Buffer], records: Records
    ) -> tuple[FileRecord, ...]:
        """Copy shards of `source` over those that `create_layer` made here, checked against `records` on the way.

        Raises:
            ShardError: As `read` and `write`.
        """
        copied = []
        for buffer in buffers:
            geometry, path = self._geometry(layer, buffer), shard_path(layer, buffer)
            if source._offsets(layer, buffer, records) != geometry.offsets:
                raise ShardError(f"{source.directory / path} keeps its chunks in another order; it was not made here")
            origin, target = source.directory / path, self.directory / path
            crcs = self._io.copy(origin, source._mode, target, self._mode, geometry.data_bytes, geometry.chunk_bytes)
            source._check(layer, buffer, crcs, records)
            copied.append(records[path])
        return tuple(copied)

    def chunks(self, layer: LayerLayout, buffer: Buffer, records: Records) -> Iterator[StorageArray]:
        """Yield the chunks of a shard one after another, checked, in memory that the next one overwrites.

        Raises:
            ShardError: As `read`.
            HostMemoryError: The system gives no memory for one.
        """
        geometry, path = self._geometry(layer, buffer), self.directory / shard_path(layer, buffer)
        memory = anonymous_memory(geometry.chunk_bytes)
        label, offsets = self._label(layer, buffer), self._offsets(layer, buffer, records)
        sums = records[shard_path(layer, buffer)].chunk_crc32c
        for number, offset in enumerate(offsets):
            blocks = FileBlocks(path, self._mode, memory, (offset,), geometry.chunk_bytes)
            ((crc,),) = self._io.read([blocks])
            if crc != sums[number]:
                raise ShardError(f"{label.chunk(number)} has another crc32c than when it was written; check the drive")
            yield memory.view(geometry.element.storage)

    def check_layer(self, layer: LayerLayout, buffers: Iterable[Buffer]) -> None:
        """Raise ShardError where the stored layout of `layer` is not the model's."""
        check_layer_metadata(self.directory, layer, self._model.precision, buffers)

    def _geometry(self, layer: LayerLayout, buffer: Buffer) -> ShardGeometry:
        return ShardGeometry.of(layer.numel, buffer_types(self._model.precision)[buffer])

    def _label(self, layer: LayerLayout, buffer: Buffer) -> ShardLabel:
        path = str(self.directory / shard_path(layer, buffer))
        return ShardLabel(path, tensor_spans(layer), self._geometry(layer, buffer).chunk_numel)

    def _blocks(
        self,
        layer: LayerLayout,
        buffer: Buffer,
        array: StorageArray,
        offsets: tuple[int, ...],
        lend: Callable[[int], AbstractContextManager[ByteArray]] | None = None,
    ) -> FileBlocks:
        geometry, path = self._geometry(layer, buffer), self.directory / shard_path(layer, buffer)
        assert array.shape == (layer.numel,) and array.dtype == geometry.element.storage
        return FileBlocks(path, self._mode, array.view(np.uint8), offsets, geometry.chunk_bytes, lend)

    def _offsets(self, layer: LayerLayout, buffer: Buffer, records: Records) -> tuple[int, ...]:
        """Check a shard's size against record and geometry and read its index."""
        path, geometry = shard_path(layer, buffer), self._geometry(layer, buffer)
        record = records.get(path)
        if record is None:
            raise ShardError(
                f"{self.directory / path} has no record: it was never stored, or its manifest is incomplete"
            )
        try:
            descriptor = os.open(self.directory / path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise fault("open", self.directory / path, error, 0, geometry.file_bytes) from error
        try:
            num_bytes = os.fstat(descriptor).st_size
            if not num_bytes == record.num_bytes == geometry.file_bytes:
                raise ShardError(
                    f"{self.directory / path} of {layer.name} has {num_bytes} bytes, its record says "
                    f"{record.num_bytes}, the model needs {geometry.file_bytes}: it is truncated or of another model"
                )
            index = os.pread(descriptor, num_bytes - geometry.data_bytes, geometry.data_bytes)
        except OSError as error:
            raise fault("read", self.directory / path, error, 0, geometry.file_bytes) from error
        finally:
            os.close(descriptor)
        return parse_index(index, geometry.num_chunks, geometry.chunk_bytes, self._label(layer, buffer))

    def _compare(self, layer: LayerLayout, buffer: Buffer, crcs: tuple[int, ...], records: Records) -> None:
        """Check what was read without the padding of the last chunk."""
        padding = bytes(self._geometry(layer, buffer).padding_bytes)
        self._check(layer, buffer, (*crcs[:-1], crc32c(padding, crcs[-1])), records)

    def _check(self, layer: LayerLayout, buffer: Buffer, crcs: tuple[int, ...], records: Records) -> None:
        expected = records[shard_path(layer, buffer)].chunk_crc32c
        if crcs == expected:
            return
        numbers = [n for n, (got, wanted) in enumerate(zip(crcs, expected, strict=True)) if got != wanted]
        raise ShardError(
            f"{self._label(layer, buffer).chunk(numbers[0])} has another crc32c than when it was written "
            f"({len(numbers)} of {len(crcs)} chunks damaged); use an earlier checkpoint, and check the drive"
        )


def write_metadata(directory: Path, file: MetadataFile) -> FileRecord:
    """Write a `zarr.json` durably and return its record. Raises ShardError naming path and errno."""
    path = directory / file.path
    try:
        make_directory(path.parent)
        write_file(path, file.content)
    except OSError as error:
        raise fault("write", path, error, 0, len(file.content)) from error
    return FileRecord(file.path, len(file.content), crc32c(file.content))


def _write_index(path: Path, geometry: ShardGeometry) -> None:
    index = geometry.index()
    try:
        with path.open("r+b") as file:
            file.seek(geometry.data_bytes)
            file.write(index)
    except OSError as error:
        raise fault("write", path, error, geometry.data_bytes, len(index)) from error
