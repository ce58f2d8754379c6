"""The actor that moves layers between disk and the arena: NVMe working files, checkpoints, first values.

Each call is one operation of a step's graph on one layer; results of earlier operations arrive as ignored trailing
arguments, so that Ray orders them. The caller sees to it that nobody else touches a slot meanwhile; a call that would
lose an update or read what is out of date all the same is refused by the residency table.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorClass

from tiers.compressed_store import CompressedStore
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError, TierError
from tiers.initialise import initialise_layer
from tiers.layout import Buffer, LayerLayout, stored_buffers
from tiers.manifest import MANIFEST_NAME, Manifest, read_manifest
from tiers.parameter_tier import TierHandle
from tiers.preflight import preflight, read_mode
from tiers.residency import Part
from tiers.residency_guard import ResidencyGuard
from tiers.safetensors_source import SafetensorsSource
from tiers.scratch import Scratch, nvme_buffers, scratch_bytes
from tiers.shard_store import ShardStore, StorageArray
from tiers.shards import FileRecord, shard_path
from tiers.store_metadata import Compression

MAX_SPANS = 100_000
"""Some steps of a model of hundreds of layers; older ones go when nobody takes them."""
CONCURRENT_CALLS = 6
"""Loads and stores of different layers at once; the I/O threads are shared."""
CONCURRENT_SNAPSHOTS = 4
"""Beside them, in threads of their own: the next step's loads, and the driver's questions, do not queue behind a
checkpoint. Compression works in these threads."""


class IoSpan(NamedTuple):
    """One operation that kept the disk busy. Times are `time.monotonic()`."""

    name: str
    """As in the step's graph, e.g. `load_state[17]`."""
    lane: str
    """`nvme_read` or `nvme_write`."""
    start_s: float
    end_s: float
    num_bytes: int


class Prefetcher:
    """I/O on the arena of `tier`. Thread-safe for calls on different layers."""

    def __init__(
        self, tier: TierHandle, *, nvme_dir: Path | None, threads: int, compression: Compression = Compression.NONE
    ) -> None:
        """Attach, and reserve every NVMe working file, so that a full disk shows before training.

        Args:
            tier: The arena and the plan.
            nvme_dir: Where layers live that the plan puts on NVMe; None where it puts none there.
            threads: Disk requests in flight.
            compression: Of the checkpoints that are written; any is read.

        Raises:
            TierError: The plan needs NVMe and none is given; the directory is missing, in use, not writable or full.
        """
        self._plan = tier.plan
        self._threads = threads
        self._compression = compression
        num_bytes = scratch_bytes(tier.plan)
        if num_bytes and nvme_dir is None:
            raise TierError(f"the plan keeps {num_bytes:,} bytes on NVMe; set memory.nvme_dir, or raise memory.ram_gib")
        self._records: dict[str, FileRecord] = {}
        self._spans: deque[IoSpan] = deque(maxlen=MAX_SPANS)
        self._sources: dict[Path, SafetensorsSource] = {}
        self._manifests: dict[Path, Manifest] = {}
        self._modes: dict[int, DirectMode] = {}
        self._lookup = threading.Lock()
        self._residency = ResidencyGuard(tier.plan.homes)
        slots = {home.state_slot for home in tier.plan.homes if home.state_slot is not None}
        self._slot_locks = {slot: threading.Lock() for slot in slots}
        self._scratch: Scratch | None = None
        self._arena, self._map = tier.attach()
        self._io = DirectIO(threads)
        try:
            if num_bytes and nvme_dir is not None:
                self._scratch = Scratch(nvme_dir)
                mode = preflight(self._scratch.path, num_bytes)
                self._working = ShardStore(self._scratch.path, tier.plan.model, self._io, mode)
                self._working.create_root()
                for layer in tier.plan.model.layers:
                    if buffers := nvme_buffers(tier.plan, layer.index):
                        self._working.create_layer(layer, buffers)
        except BaseException:
            self._release()
            raise

    @ray.method
    def initialise(self, layer: int, seed: int, *after: object) -> None:
        """Give a layer its random first values, at home in RAM or on NVMe.

        Raises:
            ShardError: The NVMe files cannot be written.
        """
        with self._filling(layer) as layout:
            initialise_layer(self._arena, self._map, layout, seed, self._threads)

    @ray.method
    def import_safetensors(self, layer: int, directory: Path, *after: object) -> None:
        """Give a layer the values of a Hugging Face directory and zero moments, at home in RAM or on NVMe.

        Raises:
            ImportedTensorError, ShardError: The directory does not hold the model, or a disk fails.
        """
        with self._lookup:
            if directory not in self._sources:
                self._sources[directory] = SafetensorsSource(directory, self._plan.model)
            source = self._sources[directory]
        with self._filling(layer) as layout:
            source.read_layer_into(self._arena, self._map, layout)

    @ray.method
    def restore(self, layer: int, checkpoint: Path, *after: object) -> None:
        """Give a layer the values of a checkpoint, whatever placement wrote it, at home in RAM or on NVMe.

        Streams straight into the arena: nothing else grows with the model.

        Raises:
            CheckpointError, ShardError: The checkpoint is incomplete, damaged, or of another model or precision.
        """
        manifest, model = self._manifest(checkpoint), self._plan.model
        if manifest.facts.precision is not model.precision:
            raise CheckpointError(
                f"{checkpoint} was trained in {manifest.facts.precision}, this run in {model.precision}; "
                "set precision.mode to that of the checkpoint"
            )
        records = manifest.records()
        store: ShardStore | CompressedStore
        if _compressed(records, self._layout(layer)):
            store = CompressedStore(checkpoint, model)
        else:
            store = ShardStore(checkpoint, model, self._io, read_mode(checkpoint / MANIFEST_NAME))
        with self._filling(layer) as layout:
            arrays = self._state(layer, stored_buffers(model.precision))
            store.check_layer(layout, arrays)
            with self._span(f"restore[{layer}]", "nvme_read", arrays):
                store.read(layout, arrays, records)

    @ray.method
    def load_weights(self, layer: int, *after: object) -> None:
        """Fill the layer's streaming slot from NVMe; what the slot held makes room, for it is only read.

        Raises:
            ShardError: What is on disk is not what was stored.
            TierError: The shard is out of date, or the slot is being filled with another layer.
        """
        arrays = {Buffer.WEIGHT: self._arena.view(self._map.weights[layer])}
        with self._residency.loading(layer, Part.WEIGHTS), self._span(f"load_weights[{layer}]", "nvme_read", arrays):
            self._working.read(self._layout(layer), arrays, self._records)

    @ray.method
    def load_state(self, layer: int, *after: object) -> None:
        """Fill the layer's state slot from NVMe: what `update` needs beside weights in RAM.

        Raises:
            ShardError: What is on disk is not what was stored.
            TierError: The slot holds a layer that has been neither stored nor released.
        """
        arrays = self._state(layer, nvme_buffers(self._plan, layer))
        with self._residency.loading(layer, Part.STATE), self._span(f"load_state[{layer}]", "nvme_read", arrays):
            self._working.read(self._layout(layer), arrays, self._records)

    @ray.method
    def release_state(self, layer: int, *after: object) -> None:
        """Give up the slot of a state that was loaded only to be read.

        Raises:
            TierError: The slot does not hold it.
        """
        self._residency.release_state(layer)

    @ray.method
    def store_state(self, layer: int, *after: object) -> None:
        """Write the layer's state slot to NVMe, its weights too where they live there; the slot is free then.

        Raises:
            ShardError: The disk fails; the layer's files are then torn, and the slot is not free for another layer.
            TierError: The slot holds another layer.
        """
        self._store(layer)

    @ray.method(concurrency_group="snapshot")
    def snapshot(self, layer: int, directory: Path, *after: object) -> tuple[FileRecord, ...]:
        """Write all of a layer's buffers durably into a checkpoint being written.

        Buffers on NVMe are copied from their files, not through a slot: the slots belong to the step at work.

        Returns:
            A record of every file, for `CheckpointWriter.publish`.

        Raises:
            ShardError: A disk fails, or a working file is not what was stored.
        """
        layout, model = self._layout(layer), self._plan.model
        on_nvme = nvme_buffers(self._plan, layer)
        in_ram = self._state(layer, [b for b in stored_buffers(model.precision) if b not in on_nvme])
        with self._span(f"snapshot[{layer}]", "nvme_write", self._state(layer, stored_buffers(model.precision))):
            if self._compression is Compression.ZSTD:
                archive = CompressedStore(directory, model)
                records = archive.create_layer(layout, stored_buffers(model.precision))
                records += archive.write(layout, in_ram)
                if on_nvme:
                    records += archive.copy_from(self._working, layout, on_nvme, self._records)
                return records
            target = ShardStore(directory, model, self._io, self._mode(directory))
            records = target.create_layer(layout, stored_buffers(model.precision))
            if in_ram:
                records += target.write(layout, in_ram, sync=True)
            if on_nvme:
                with self._span(f"snapshot[{layer}]", "nvme_read", self._state(layer, on_nvme)):
                    records += target.copy_from(self._working, layout, on_nvme, self._records)
        return records

    @ray.method(concurrency_group="question")
    def take_spans(self) -> tuple[IoSpan, ...]:
        """Return the operations that ended since the last call, at most MAX_SPANS, and forget them."""
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        return tuple(spans)

    @ray.method
    def close(self) -> None:
        """End the threads and remove the NVMe working files. May be called twice."""
        self._release()

    def _release(self) -> None:
        self._io.close()
        if self._scratch is not None:
            self._scratch.close()
        self._arena.close()

    def _store(self, layer: int) -> None:
        arrays = self._state(layer, nvme_buffers(self._plan, layer))
        with self._residency.storing(layer), self._span(f"store_state[{layer}]", "nvme_write", arrays):
            # Not synced: scratch does not outlive its run, and O_DIRECT leaves nothing in the page cache.
            records = self._working.write(self._layout(layer), arrays, sync=False)
            self._records.update({record.path: record for record in records})

    def _layout(self, layer: int) -> LayerLayout:
        return self._plan.model.layers[layer]

    def _state(self, layer: int, buffers: tuple[Buffer, ...] | list[Buffer]) -> dict[Buffer, StorageArray]:
        """Memory where `update` finds the buffers."""
        return {buffer: self._arena.view(self._map.states[layer][buffer]) for buffer in buffers}

    @contextmanager
    def _filling(self, layer: int) -> Iterator[LayerLayout]:
        """Let the caller fill where the layer is updated, then bring it home.

        Before a run no graph orders the layers that share a slot, so a lock does.
        """
        slot = self._plan.homes[layer].state_slot
        with self._slot_locks[slot] if slot is not None else nullcontext():
            yield self._layout(layer)
            if slot is not None:
                self._store(layer)

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

    @contextmanager
    def _span(self, name: str, lane: str, arrays: dict[Buffer, StorageArray]) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        num_bytes = sum(array.nbytes for array in arrays.values())
        self._spans.append(IoSpan(name, lane, start_s, time.monotonic(), num_bytes))


def _compressed(records: dict[str, FileRecord], layer: LayerLayout) -> bool:
    record = records.get(shard_path(layer, Buffer.WEIGHT))
    return record is not None and bool(record.stored_bytes)


# Groups must be named here, not in `.options()`; Ray's types do not know the argument.
PrefetcherActor: ActorClass[Prefetcher] = ray.remote(  # type: ignore[call-overload]
    max_concurrency=CONCURRENT_CALLS, concurrency_groups={"snapshot": CONCURRENT_SNAPSHOTS, "question": 1}
)(Prefetcher)
