"""Layers of checkpoints, one at a time, between their files and the arena: as they are, or compressed.

`checkpoint` makes whole checkpoints of them and says which are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiers.compressed_store import CompressedStore
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError
from tiers.io_spans import IoSpans
from tiers.layout import Buffer, LayerLayout, ModelLayout, buffer_types, stored_buffers
from tiers.manifest import MANIFEST_NAME, Manifest, read_manifest
from tiers.preflight import preflight, read_mode
from tiers.shard_store import Records, ShardStore, StorageArray
from tiers.shards import FileRecord, ShardGeometry, shard_path
from tiers.store_metadata import Compression
from tiers.write_behind import WriteBehind


class CheckpointLayers:
    """Reads and writes layers of any checkpoints of one model. Thread-safe for calls on different layers."""

    def __init__(
        self, model: ModelLayout, io: DirectIO, spans: IoSpans, compression: Compression, staging_bytes: int = 0
    ) -> None:
        """Use the threads of `io`, which stays the caller's.

        Args:
            model: Whose layers.
            io: Moves the bytes of what is not compressed.
            spans: Told what was read and written.
            compression: Of what is written; anything is read.
            staging_bytes: The most memory for copies of what is being written while its home changes.
        """
        self._model = model
        self._io = io
        self._spans = spans
        self._compression = compression
        self._lookup = threading.Lock()
        self._manifests: dict[Path, Manifest] = {}
        self._modes: dict[int, DirectMode] = {}
        self._behind = WriteBehind(staging_bytes)

    def check_precision(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of another precision.

        Raises:
            CheckpointError: It is one, or has no manifest that can be read.
        """
        precision = self._manifest(checkpoint).facts.precision
        if precision is not self._model.precision:
            raise CheckpointError(
                f"{checkpoint} was trained in {precision}, this run in {self._model.precision}; "
                "set precision.mode to that of the checkpoint"
            )

    def read(self, checkpoint: Path, layer: LayerLayout, arrays: Mapping[Buffer, StorageArray]) -> None:
        """Fill `arrays`, all stored buffers of a layer.

        Raises:
            CheckpointError, ShardError: The checkpoint is incomplete, damaged, or of another model.
        """
        records = self._manifest(checkpoint).records()
        store: ShardStore | CompressedStore
        if _compressed(records, layer):
            store = CompressedStore(checkpoint, self._model)
        else:
            store = ShardStore(checkpoint, self._model, self._io, read_mode(checkpoint / MANIFEST_NAME))
        store.check_layer(layer, arrays)
        with self._spans.during(f"restore[{layer.index}]", "nvme_read", self._num_bytes(layer, tuple(arrays))):
            store.read(layer, arrays, records)

    def write(
        self,
        directory: Path,
        layer: LayerLayout,
        in_ram: Mapping[Buffer, StorageArray],
        on_nvme: Sequence[Buffer],
        working: ShardStore | None,
        records: Records,
    ) -> tuple[FileRecord, ...]:
        """Write all stored buffers of a layer durably into a checkpoint being written.

        Args:
            directory: Of the checkpoint.
            layer: The layer.
            in_ram: Its buffers in the arena, unchanged until this or a `capture` of the layer returns.
            on_nvme: Its other buffers, which are copied from the files of `working`.
            working: Where they lie; None where there are none.
            records: Of the working files.

        Returns:
            A record of every file.

        Raises:
            ShardError: A disk fails, or a working file is not what was stored.
        """
        buffers = stored_buffers(self._model.precision)
        name = f"snapshot[{layer.index}]"
        with (
            # Who changes files waits for this; only what lies in RAM as a whole is captured.
            self._behind.writing(
                directory, layer.index, in_ram, self._chunk_bytes(layer), to_be_captured=not on_nvme
            ) as pending,
            self._spans.during(name, "nvme_write", self._num_bytes(layer, buffers)),
        ):
            if self._compression is Compression.ZSTD:
                archive = CompressedStore(directory, self._model)
                written = archive.create_layer(layer, buffers)
                written += archive.write(layer, in_ram, pending.chunk)
                if working is not None and on_nvme:
                    written += archive.copy_from(working, layer, on_nvme, records)
                return written
            target = ShardStore(directory, self._model, self._io, self._mode(directory))
            written = target.create_layer(layer, buffers)
            if in_ram:
                written += target.write(layer, in_ram, sync=True, lend=pending.chunk)
            if working is not None and on_nvme:
                with self._spans.during(name, "nvme_read", self._num_bytes(layer, on_nvme)):
                    written += target.copy_from(working, layer, on_nvme, records)
        return written

    def capture(self, directory: Path, layer: LayerLayout, in_ram: Mapping[Buffer, StorageArray]) -> None:
        """Return when `in_ram` may change although its `write` goes on, or has yet to begin.

        Copies what is not written yet as far as there is staging memory, and waits for the rest.
        """
        self._behind.capture(directory, layer.index, in_ram, self._chunk_bytes(layer))

    def _chunk_bytes(self, layer: LayerLayout) -> dict[Buffer, int]:
        types = buffer_types(self._model.precision)
        buffers = stored_buffers(self._model.precision)
        return {buffer: ShardGeometry.of(layer.numel, types[buffer]).chunk_bytes for buffer in buffers}

    def _num_bytes(self, layer: LayerLayout, buffers: Sequence[Buffer]) -> int:
        types = buffer_types(self._model.precision)
        return layer.numel * sum(types[buffer].bytes for buffer in buffers)

    def _manifest(self, checkpoint: Path) -> Manifest:
        with self._lookup:
            if checkpoint not in self._manifests:
                self._manifests[checkpoint] = read_manifest(checkpoint)
            return self._manifests[checkpoint]

    def _mode(self, directory: Path) -> DirectMode:
        """Preflight once a filesystem, so that its warning comes once."""
        device = directory.stat().st_dev
        with self._lookup:
            if device not in self._modes:
                self._modes[device] = preflight(directory)
            return self._modes[device]


def _compressed(records: Records, layer: LayerLayout) -> bool:
    record = records.get(shard_path(layer, Buffer.WEIGHT))
    return record is not None and bool(record.stored_bytes)
