"""The streamed tier against its own disk: the Prefetcher's calls on real layers and raw O_DIRECT, turn about.

Both move the same bytes in the same run on the same drive, so that what other tenants of the drive do to one they do to
the other; what is reported is the median of the rounds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tasks.bench.sample import sample_layers
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.direct_file import DirectMode, preallocate
from tiers.direct_io import MAX_BLOCK_BYTES
from tiers.host_memory import shared_memory_has_huge_pages
from tiers.layout import PAGE_BYTES, Buffer, ElementType, ModelLayout, Precision, round_up, stored_buffers
from tiers.parameter_tier import ParameterTier
from tiers.prefetcher import Prefetcher
from tiers.preflight import preflight
from tiers.scratch import SCRATCH_NAME, scratch_bytes

STORED_BYTES_PER_PARAMETER = 12

STAGING_SLOTS = 2
"""Layers in flight, as in a run."""


@dataclass(frozen=True)
class Transfer:
    """One direction of one buffer set, all layers, in one round."""

    num_bytes: int
    seconds: float
    cpu_s: float
    """Of all threads of this process, the kernel's part included."""

    @property
    def gbps(self) -> float:
        """1e9 bytes a second."""
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True)
class TransferReport:
    """A call of the Prefetcher beside raw O_DIRECT: medians of the rounds."""

    gbps: float
    raw_gbps: float
    of_raw: float
    """Median of the rounds' ratios."""
    cpu_s_per_gb: float
    raw_cpu_s_per_gb: float


@dataclass(frozen=True)
class TierReport:
    """What the streamed tier sustains."""

    directory: str
    layers: int
    parameters_per_layer: int
    bytes_per_round: int
    """Written, and read, by store_state and by load_state each."""
    rounds: int
    threads: int
    o_direct: bool
    huge_pages: bool
    """Whether the arena had them; the raw transfers' memory always has."""
    store_state: TransferReport
    load_state: TransferReport
    load_weights: TransferReport
    zarr_shards_equal: int
    """Shards that plain zarr opened and read the same values from: all of them, or the command fails."""


def measure_tier(
    model: ModelLayout, directory: Path, *, num_bytes: int, threads: int, rounds: int, say: Callable[[str], None]
) -> TierReport:
    """Stream decoder layers of a model, weights and state, to and from a directory.

    Args:
        model: Whose decoder layers are streamed.
        directory: On the drive; left as it was found.
        num_bytes: To write in a round, about: whole layers, at least two.
        threads: Disk requests in flight, the tier's and the raw ones alike.
        rounds: Repetitions after one to warm up.
        say: Told how it goes.

    Raises:
        TierError: The directory or the memory does not do.
        ValueError: The model has fewer layers than `STAGING_SLOTS`.
    """
    plan = _plan(model, num_bytes, say)
    layers = range(len(plan.model.layers))
    total_bytes = round_up(scratch_bytes(plan), PAGE_BYTES)
    mode = preflight(directory, 2 * total_bytes)
    with ExitStack() as held:
        tier: Any = ParameterTier(plan)
        held.callback(tier.close)
        arena, arena_map = tier.handle().attach()
        held.callback(arena.close)
        _fill(arena, arena_map)
        prefetcher: Any = Prefetcher(tier.handle(), nvme_dir=directory, threads=threads)
        held.callback(prefetcher.close)
        calls = held.enter_context(ThreadPoolExecutor(STAGING_SLOTS))
        raw = held.enter_context(_raw_file(directory, mode, total_bytes, threads))
        weight_bytes = sum(arena_map.weights[layer].num_bytes for layer in layers)
        state_bytes = sum(extent.num_bytes for layer in layers for extent in arena_map.states[layer].values())
        works: dict[str, tuple[Callable[[], Transfer], Callable[[], Transfer]]] = {
            "store_state": (
                lambda: _calls(calls, prefetcher.store_state, layers, state_bytes),
                lambda: raw(True, state_bytes),
            ),
            "load_state": (
                lambda: _calls(calls, partial(_read_state, prefetcher), layers, state_bytes),
                lambda: raw(False, state_bytes),
            ),
            "load_weights": (
                lambda: _calls(calls, prefetcher.load_weights, layers, weight_bytes),
                lambda: raw(False, weight_bytes),
            ),
        }
        measured: dict[str, list[tuple[Transfer, Transfer]]] = {name: [] for name in works}
        for number in range(rounds + 1):
            for name, (tier_work, raw_work) in works.items():
                # Who goes first changes: a drive's cache favours one of the two.
                pair = (tier_work(), raw_work()) if number % 2 else (raw_work(), tier_work())[::-1]
                if number:
                    measured[name].append(pair)
                say(f"round {number}: {name} {pair[0].gbps:.2f} GB/s, raw {pair[1].gbps:.2f} GB/s")
        equal = _check_with_zarr(directory / SCRATCH_NAME, prefetcher, arena, arena_map)
    reports = {name: _report(pairs) for name, pairs in measured.items()}
    return TierReport(
        directory=str(directory),
        layers=len(layers),
        parameters_per_layer=plan.model.layers[0].num_parameters,
        bytes_per_round=state_bytes,
        rounds=rounds,
        threads=threads,
        o_direct=mode is DirectMode.DIRECT,
        huge_pages=shared_memory_has_huge_pages(),
        zarr_shards_equal=equal,
        **reports,
    )


def _plan(model: ModelLayout, num_bytes: int, say: Callable[[str], None]) -> TierPlan:
    """Decoder layers alone, all on NVMe."""
    # As many for each slot: a lane that works alone at the end of a round is no steady state.
    layers = sample_layers(model, num_bytes, STORED_BYTES_PER_PARAMETER, say, multiple_of=STAGING_SLOTS)
    homes = tuple(LayerHome(index % STAGING_SLOTS, index % STAGING_SLOTS, 0) for index in range(len(layers)))
    gradient = ElementType.FLOAT32 if model.precision is Precision.FP32 else ElementType.BFLOAT16
    return TierPlan(ModelLayout(layers, model.precision, model.tied), homes, gradient)


def _fill(arena: Arena, arena_map: ArenaMap) -> None:
    """Bits that no drive can compress, in every slot."""
    tile = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8)
    for extent in arena_map.extents():
        memory = arena.bytes_view(extent.offset_bytes, extent.num_bytes)
        for start in range(0, memory.size, tile.size):
            memory[start : start + tile.size] = tile[: memory.size - start]


def _calls(pool: ThreadPoolExecutor, call: Callable[[int], None], layers: range, num_bytes: int) -> Transfer:
    """One call a layer; layers that share a slot one after another, as the step's graph has them."""

    def run(slot: int) -> None:
        for layer in layers[slot::STAGING_SLOTS]:
            call(layer)

    return _timed(lambda: list(pool.map(run, range(STAGING_SLOTS))), num_bytes)


def _read_state(prefetcher: Any, layer: int) -> None:
    prefetcher.load_state(layer)
    prefetcher.release_state(layer)


def _timed(work: Callable[[], object], num_bytes: int) -> Transfer:
    start_s, cpu_start_s = time.monotonic(), time.process_time()
    work()
    return Transfer(num_bytes, time.monotonic() - start_s, time.process_time() - cpu_start_s)


@contextmanager
def _raw_file(
    directory: Path, mode: DirectMode, num_bytes: int, threads: int
) -> Iterator[Callable[[bool, int], Transfer]]:
    """A file of as many bytes, moved by nothing but preadv and pwritev of the same block size and number of threads.

    From and to the memory that suits a drive best, private huge pages, a few blocks used over and over.
    """
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=directory) as folder, ThreadPoolExecutor(threads) as pool:
        path = Path(folder) / "raw"
        preallocate(path, num_bytes)
        private = mmap.mmap(-1, threads * MAX_BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            private.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(private, np.uint8)
        memory[:] = np.random.default_rng(1).integers(0, 256, memory.size, dtype=np.uint8)
        blocks = [memory[n * MAX_BLOCK_BYTES : (n + 1) * MAX_BLOCK_BYTES] for n in range(threads)]
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | mode.flag)

        def run(write: bool, wanted_bytes: int) -> Transfer:
            move = os.pwritev if write else os.preadv
            starts = range(0, wanted_bytes, MAX_BLOCK_BYTES)

            def share(number: int) -> None:
                for start in starts[number::threads]:
                    block = blocks[number][: min(MAX_BLOCK_BYTES, wanted_bytes - start)]
                    done = move(descriptor, [block.data], start)
                    assert done == block.size, f"{done} of {block.size} bytes"

            return _timed(lambda: list(pool.map(share, range(threads))), wanted_bytes)

        try:
            run(True, num_bytes)
            yield run
        finally:
            os.close(descriptor)


def _check_with_zarr(scratch: Path, prefetcher: Any, arena: Arena, arena_map: ArenaMap) -> int:
    """Read every shard with plain zarr and compare it with what `load_state` brings; return their number."""
    group = zarr.open_group(scratch, mode="r")
    equal = 0
    for layer in arena_map.plan.model.layers:
        prefetcher.load_state(layer.index)
        for buffer in stored_buffers(arena_map.plan.model.precision):
            stored = group[f"{layer.name}/{buffer}"]
            assert isinstance(stored, zarr.Array)
            wanted = arena.view(arena_map.states[layer.index][Buffer(buffer)])
            same = np.array_equal(np.asarray(stored[:]).view(np.uint8), wanted.view(np.uint8))
            assert same, f"zarr reads other values from {layer.name}/{buffer} than load_state"
            equal += 1
        prefetcher.release_state(layer.index)
    return equal


def _report(pairs: list[tuple[Transfer, Transfer]]) -> TransferReport:
    def cpu_s_per_gb(transfer: Transfer) -> float:
        return transfer.cpu_s / transfer.num_bytes * 1e9

    return TransferReport(
        gbps=statistics.median(ours.gbps for ours, _ in pairs),
        raw_gbps=statistics.median(raw.gbps for _, raw in pairs),
        of_raw=statistics.median(ours.gbps / raw.gbps for ours, raw in pairs),
        cpu_s_per_gb=statistics.median(cpu_s_per_gb(ours) for ours, _ in pairs),
        raw_cpu_s_per_gb=statistics.median(cpu_s_per_gb(raw) for _, raw in pairs),
    )
