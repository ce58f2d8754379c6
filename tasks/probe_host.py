"""Rates of host memory, of the optimizer's kernel and of a drive, measured with the code that a run uses."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from pipeline.prediction.hardware import Nvme
from pipeline.updates.adamw import OptimizerSettings, Scalars, update
from tiers.checksum import ByteArray
from tiers.direct_file import preallocate
from tiers.direct_io import DirectIO, FileBlocks
from tiers.host_memory import available_host_bytes
from tiers.preflight import preflight

COPY_BYTES = 256 << 20
UPDATE_ELEMENTS = 8 << 20
"""Of each thread: 112 MiB, far beyond any cache."""
UPDATE_BLOCK = 1 << 20
IO_BYTES = 256 << 20
IO_BLOCK = 16 << 20
IO_THREADS = 8


def copy_gbps(threads: int, seconds: float) -> float:
    """Reads plus writes of memory-to-memory copies by all threads, 1e9 bytes a second."""
    size = min(COPY_BYTES, available_host_bytes() // (8 * threads))
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]

    def copy(number: int) -> int:
        source, target = pairs[number]
        np.copyto(target, source)
        return 2 * size

    return _rate(copy, threads, seconds) / 1e9


def update_gparams_per_s(
    threads: int, seconds: float, beside: Callable[[], AbstractContextManager[object]] = nullcontext
) -> float:
    """AdamW on the split master by all threads, each on memory of its own; 1e9 parameters a second.

    Args:
        threads: At work.
        seconds: To measure.
        beside: Makes a context in which other work goes on, e.g. the GPU's.
    """
    elements = min(UPDATE_ELEMENTS, available_host_bytes() // (64 * threads) // UPDATE_BLOCK * UPDATE_BLOCK)
    assert elements, "less than 64 MiB a thread are free"
    rng = np.random.default_rng(0)
    scalars = Scalars.of(
        OptimizerSettings((0.9, 0.95), 1e-8, 0.1), lr=1e-5, applied_steps=10, clip_coefficient=1.0, decay=True
    )
    # bf16 of values near one, so that nothing is denormal.
    bits = rng.integers(0x3F00, 0x3F80, elements, dtype=np.uint16)
    gradients = [bits.copy() for _ in range(threads)]
    masters = [(bits.copy(), np.zeros(elements, np.int16)) for _ in range(threads)]
    moments = [[np.full(elements, 0.5, np.float32) for _ in range(2)] for _ in range(threads)]

    def step(number: int) -> int:
        (weight, low), (exp_avg, exp_avg_sq) = masters[number], moments[number]
        for start in range(0, elements, UPDATE_BLOCK):
            run = slice(start, start + UPDATE_BLOCK)
            update(weight[run], low[run], exp_avg[run], exp_avg_sq[run], gradients[number][run], scalars)
        return elements

    step(0)
    with beside():
        return _rate(step, threads, seconds) / 1e9


def _rate(work: Callable[[int], int], threads: int, seconds: float) -> float:
    """Units a second of `work(thread)`, which returns the units it did, repeated by all threads for `seconds`."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
        start = time.monotonic()

        def repeat(number: int) -> int:
            done = 0
            while time.monotonic() - start < seconds:
                done += work(number)
            return done

        done = sum(pool.map(repeat, range(threads)))
        return done / (time.monotonic() - start)


def measure_nvme(directory: Path, seconds: float, progress: Callable[[str], None]) -> Nvme:
    """Sustained O_DIRECT rates of a directory, each way alone and both at once. Leaves nothing behind.

    Args:
        directory: Existing and writable.
        seconds: For each of the three measurements.
        progress: Told what begins.

    Raises:
        ShardError: The directory is missing, not writable, too full or faulty.
    """
    mode = preflight(directory, 4 * IO_BYTES)
    free_bytes = shutil.disk_usage(directory).free
    # Some 2 GB a measured second, so that a fast drive does not come round to the same blocks at once.
    file_bytes = max(1, int(min(2e9 * seconds, free_bytes // 4)) // IO_BYTES) * IO_BYTES
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=directory) as folder, DirectIO(IO_THREADS) as io:
        files = [Path(folder) / "a", Path(folder) / "b"]
        for path in files:
            preallocate(path, file_bytes)
        memories = [_pages(), _pages()]

        def move(number: int, write: bool, cursor: int) -> int:
            offset = cursor % file_bytes
            blocks = FileBlocks(
                files[number], mode, memories[number], range(offset, offset + IO_BYTES, IO_BLOCK), IO_BLOCK
            )
            if write:
                io.write([blocks], sync=False)
            else:
                io.read([blocks])
            return IO_BYTES

        def run(number: int, write: bool, stop: Callable[[int], bool]) -> float:
            """1e9 bytes a second."""
            start, done = time.monotonic(), 0
            while not stop(done):
                done += move(number, write, done)
            if write:
                descriptor = os.open(files[number], os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            return done / (time.monotonic() - start) / 1e9

        def until(deadline: float, least: int = 0) -> Callable[[int], bool]:
            return lambda done: time.monotonic() > deadline and done >= least

        progress(f"writing to {directory}")
        # The whole file at least once, within reason: preallocated ranges that were never written read as zeros.
        written_gbps = run(0, True, until(time.monotonic() + seconds, file_bytes))
        progress(f"reading from {directory}")
        read_gbps = run(0, False, until(time.monotonic() + seconds))
        progress(f"writing to and reading from {directory} at once")
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(1) as other:
            reading = other.submit(run, 0, False, until(deadline))
            write_busy_gbps = run(1, True, until(deadline))
            read_busy_gbps = reading.result()
    return Nvme(
        capacity_gb=free_bytes / 1e9,
        read_gbps=read_gbps,
        write_gbps=written_gbps,
        read_busy_gbps=read_busy_gbps,
        write_busy_gbps=write_busy_gbps,
    )


def _pages() -> ByteArray:
    """Page-aligned memory with content that no drive can compress."""
    memory = np.frombuffer(mmap.mmap(-1, IO_BYTES), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, IO_BYTES, dtype=np.uint8)
    return memory
