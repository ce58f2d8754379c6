"""The actor that moves layers between disk and the arena: NVMe working files, checkpoints, first values.

Each call is one operation of a step's graph on one layer; results of earlier operations arrive as ignored trailing
arguments, so that Ray orders them. The caller sees to it that nobody else touches a slot meanwhile; a call that would
lose an update or read what is out of date all the same is refused by the residency table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import ray
from ray.actor import ActorClass

from tiers.checkpoint_layers import CheckpointLayers
from tiers.direct_io import DirectIO
from tiers.errors import TierError
from tiers.initialise import drawing_threads, initialise_layer
from tiers.io_spans import IoSpan, IoSpans
from tiers.layout import Buffer, LayerLayout, stored_buffers
from tiers.parameter_tier import TierHandle
from tiers.preflight import preflight
from tiers.processors import usable_cores
from tiers.residency import Part
from tiers.residency_guard import ResidencyGuard
from tiers.safetensors_source import SafetensorsSource
from tiers.scratch import Scratch, nvme_buffers, scratch_bytes
from tiers.shard_store import ShardStore, StorageArray
from tiers.shards import FileRecord
from tiers.store_metadata import Compression

CONCURRENT_CALLS = 6
"""Loads and stores of different layers at once; the I/O threads are shared."""
CONCURRENT_SNAPSHOTS = 4
"""Beside them, in threads of their own: the next step's loads, and the driver's questions, do not queue behind a
checkpoint. Compression works in these threads."""
CONCURRENT_CAPTURES = min(8, max(2, usable_cores() // 2))
"""The updates wait for copies, into memory that the system must first give and clear: a thread comes to one to three
GB/s, eight to what a machine's memory does. Half of the cores are left to what computes and updates."""


class Prefetcher:
    """I/O on the arena of `tier`. Thread-safe for calls on different layers."""

    def __init__(
        self,
        tier: TierHandle,
        *,
        nvme_dir: Path | None,
        threads: int,
        compression: Compression = Compression.NONE,
        staging_bytes: int = 0,
    ) -> None:
        """Attach, and reserve every NVMe working file, so that a full disk shows before training.

        Args:
            tier: The arena and the plan.
            nvme_dir: Where layers live that the plan puts on NVMe; None where it puts none there.
            threads: Disk requests in flight.
            compression: Of the checkpoints that are written; any is read.
            staging_bytes: The most memory for copies of what is being written to a checkpoint while training goes on.

        Raises:
            TierError: The plan needs NVMe and none is given; the directory is missing, in use, not writable or full.
        """
        self._plan = tier.plan
        self._drawing = threading.Lock()
        num_bytes = scratch_bytes(tier.plan)
        if num_bytes and nvme_dir is None:
            raise TierError(f"the plan keeps {num_bytes:,} bytes on NVMe; set memory.nvme_dir, or raise memory.ram_gib")
        self._records: dict[str, FileRecord] = {}
        self._spans = IoSpans()
        self._sources: dict[Path, SafetensorsSource] = {}
        self._lookup = threading.Lock()
        self._residency = ResidencyGuard(tier.plan.homes)
        slots = {home.state_slot for home in tier.plan.homes if home.state_slot is not None}
        self._slot_locks = {slot: threading.Lock() for slot in slots}
        self._scratch: Scratch | None = None
        self._working: ShardStore | None = None
        self._arena, self._map = tier.attach()
        self._io = DirectIO(threads)
        # Threads of its own, since what a step waits for may not queue behind a checkpoint; of no lower priority, since
        # the next update may have to wait for them.
        self._checkpoint_io = DirectIO(threads)
        self._checkpoints = CheckpointLayers(
            tier.plan.model, self._checkpoint_io, self._spans, compression, staging_bytes
        )
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
        # One layer at a time has all the threads; the stores of others go on meanwhile.
        with self._filling(layer) as layout, self._drawing:
            initialise_layer(self._arena, self._map, layout, seed, drawing_threads())

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
        self._checkpoints.check_precision(checkpoint)
        with self._filling(layer) as layout:
            arrays = self._state(layer, stored_buffers(self._plan.model.precision))
            self._checkpoints.read(checkpoint, layout, arrays)

    @ray.method
    def load_weights(self, layer: int, *after: object) -> None:
        """Fill the layer's streaming slot from NVMe; what the slot held makes room, for it is only read.

        Raises:
            ShardError: What is on disk is not what was stored.
            TierError: The shard is out of date, or the slot is being filled with another layer.
        """
        arrays = {Buffer.WEIGHT: self._arena.view(self._map.weights[layer])}
        with self._residency.loading(layer, Part.WEIGHTS), self._span(f"load_weights[{layer}]", "nvme_read", arrays):
            self._nvme().read(self._layout(layer), arrays, self._records)

    @ray.method
    def load_state(self, layer: int, *after: object) -> None:
        """Fill the layer's state slot from NVMe: what `update` needs beside weights in RAM.

        Raises:
            ShardError: What is on disk is not what was stored.
            TierError: The slot holds a layer that has been neither stored nor released.
        """
        arrays = self._state(layer, nvme_buffers(self._plan, layer))
        with self._residency.loading(layer, Part.STATE), self._span(f"load_state[{layer}]", "nvme_read", arrays):
            self._nvme().read(self._layout(layer), arrays, self._records)

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

        What lies in RAM must not change before this, or a `capture` of the layer for the same directory, returns.
        Buffers on NVMe are copied from their files, not through a slot: the slots belong to the step at work.

        Returns:
            A record of every file, for `CheckpointWriter.publish`.

        Raises:
            ShardError: A disk fails, or a working file is not what was stored.
        """
        on_nvme, in_ram = nvme_buffers(self._plan, layer), self._in_ram(layer)
        return self._checkpoints.write(directory, self._layout(layer), in_ram, on_nvme, self._working, self._records)

    @ray.method(concurrency_group="capture")
    def capture(self, layer: int, directory: Path, *after: object) -> None:
        """Let a layer in RAM be updated although its `snapshot` goes on: copy aside what is not written, or wait."""
        assert not nvme_buffers(self._plan, layer), "files are not captured: who changes them waits for the snapshot"
        self._checkpoints.capture(directory, self._layout(layer), self._in_ram(layer))

    @ray.method(concurrency_group="question")
    def take_spans(self) -> tuple[IoSpan, ...]:
        """Return the operations that ended since the last call, and forget them."""
        return self._spans.take()

    @ray.method
    def close(self) -> None:
        """End the threads and remove the NVMe working files. May be called twice."""
        self._release()

    def _release(self) -> None:
        self._io.close()
        self._checkpoint_io.close()
        if self._scratch is not None:
            self._scratch.close()
        self._arena.close()

    def _store(self, layer: int) -> None:
        arrays = self._state(layer, nvme_buffers(self._plan, layer))
        with self._residency.storing(layer), self._span(f"store_state[{layer}]", "nvme_write", arrays):
            # Not synced: scratch does not outlive its run, and O_DIRECT leaves nothing in the page cache.
            records = self._nvme().write(self._layout(layer), arrays, sync=False)
            self._records.update({record.path: record for record in records})

    def _nvme(self) -> ShardStore:
        """The working files, which hold all that `_records` names."""
        assert self._working is not None, "nothing of this plan lives on NVMe"
        return self._working

    def _layout(self, layer: int) -> LayerLayout:
        return self._plan.model.layers[layer]

    def _state(self, layer: int, buffers: tuple[Buffer, ...] | list[Buffer]) -> dict[Buffer, StorageArray]:
        """Memory where `update` finds the buffers."""
        return {buffer: self._arena.view(self._map.states[layer][buffer]) for buffer in buffers}

    def _in_ram(self, layer: int) -> dict[Buffer, StorageArray]:
        """What of a layer is at home in RAM."""
        on_nvme = nvme_buffers(self._plan, layer)
        return self._state(layer, [b for b in stored_buffers(self._plan.model.precision) if b not in on_nvme])

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

    @contextmanager
    def _span(self, name: str, lane: str, arrays: dict[Buffer, StorageArray]) -> Iterator[None]:
        with self._spans.during(name, lane, sum(array.nbytes for array in arrays.values())):
            yield


CONCURRENCY_GROUPS = {"snapshot": CONCURRENT_SNAPSHOTS, "capture": CONCURRENT_CAPTURES, "question": 1}

# Groups must be named here, not in `.options()`; Ray's types do not know the argument.
PrefetcherActor: ActorClass[Prefetcher] = ray.remote(  # type: ignore[call-overload]
    max_concurrency=CONCURRENT_CALLS, concurrency_groups=CONCURRENCY_GROUPS
)(Prefetcher)
