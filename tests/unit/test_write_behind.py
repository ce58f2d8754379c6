"""What a checkpoint reads while training goes on: the bytes of its step, whatever the home holds by then."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tiers import staging
from tiers.layout import PAGE_BYTES, Buffer
from tiers.staging import BLOCK_BYTES, BLOCKS_A_LOOK, Block, Staging
from tiers.write_behind import PendingLayer, WriteBehind

HERE = Path("step-000001.partial")
CHUNKS = {Buffer.WEIGHT: PAGE_BYTES, Buffer.EXP_AVG: PAGE_BYTES}
NUMEL = 3 * PAGE_BYTES // 4 - 100
"""Of two buffers of three chunks each, the last one short."""


def home() -> dict[Buffer, np.ndarray]:
    return {buffer: np.arange(NUMEL, dtype=np.float32) + place for place, buffer in enumerate(CHUNKS)}


def written(behind: WriteBehind, arrays: dict[Buffer, np.ndarray], layer: int = 0) -> dict[Buffer, bytes]:
    """What a writer finds, chunk by chunk."""
    found = {}
    with behind.writing(HERE, layer, arrays, CHUNKS) as pending:
        for buffer in CHUNKS:
            parts = []
            for number in range(3):
                with pending.chunk(buffer, number) as memory:
                    parts.append(memory.tobytes())
            found[buffer] = b"".join(parts)
    return found


def as_bytes(arrays: dict[Buffer, np.ndarray]) -> dict[Buffer, bytes]:
    return {buffer: array.tobytes() for buffer, array in arrays.items()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the blocks of staging memory that are made."""
    blocks: list[int] = []
    make = staging._block

    def counted() -> Block:
        blocks.append(1)
        return make()

    monkeypatch.setattr(staging, "_block", counted)
    return blocks


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_a_layer_that_was_written_in_time_is_never_copied(made: list[int]) -> None:
    behind, arrays = WriteBehind(100 * BLOCK_BYTES), home()
    assert written(behind, arrays) == as_bytes(arrays)
    behind.capture(HERE, 0, arrays, CHUNKS)
    assert not made and not behind._layers


def test_a_layer_that_was_captured_before_its_writing_began_is_written_as_it_was(made: list[int]) -> None:
    behind, arrays = WriteBehind(100 * BLOCK_BYTES), home()
    wanted = as_bytes(arrays)
    behind.capture(HERE, 0, arrays, CHUNKS)
    for array in arrays.values():
        array[:] = -1
    assert written(behind, arrays) == wanted
    assert len(made) == 6 and not behind._layers
    assert behind.staging._lent == 0 and not behind.staging._free


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_with_too_little_room_a_capture_waits_until_the_rest_is_written(
    blocks: int, made: list[int], aside: ThreadPoolExecutor
) -> None:
    behind, arrays = WriteBehind(blocks * BLOCK_BYTES + BLOCK_BYTES - 1), home()
    wanted, changed = as_bytes(arrays), threading.Event()

    def update() -> None:
        behind.capture(HERE, 0, arrays, CHUNKS)
        for array in arrays.values():
            array[:] = -1
        changed.set()

    with behind.writing(HERE, 0, arrays, CHUNKS) as pending, pending.chunk(Buffer.WEIGHT, 0) as first:
        updated = aside.submit(update)
        with behind.changed:
            behind.changed.wait_for(lambda: len(made) == blocks, timeout=60)
        # The home of what is being read is not free, however much room there is.
        assert first.tobytes() == wanted[Buffer.WEIGHT][:PAGE_BYTES] and not changed.is_set()
        parts: dict[Buffer, bytes] = dict.fromkeys(CHUNKS, b"")
        for buffer in CHUNKS:
            for number in range(3):
                if (buffer, number) != (Buffer.WEIGHT, 0):
                    with pending.chunk(buffer, number) as memory:
                        parts[buffer] += memory.tobytes()
        parts[Buffer.WEIGHT] = first.tobytes() + parts[Buffer.WEIGHT]
    updated.result(60)
    assert parts == wanted
    # A block that came free may have been used for another chunk; more than these there never were.
    assert len(made) == blocks and behind.staging._lent == 0


def blocks_of(pending: PendingLayer) -> int:
    return sum(chunk.block is not None for chunks in pending._chunks.values() for chunk in chunks)


def test_what_comes_free_goes_to_the_layer_that_was_captured_first(aside: ThreadPoolExecutor) -> None:
    behind, arrays = WriteBehind(BLOCK_BYTES), home()
    first = aside.submit(behind.capture, HERE, 0, arrays, CHUNKS)
    with behind.changed:
        assert behind.changed.wait_for(lambda: behind.short_of_blocks == {1}, timeout=60)
    second = aside.submit(behind.capture, HERE, 1, arrays, CHUNKS)
    with behind.changed:
        assert behind.changed.wait_for(lambda: behind.short_of_blocks == {1, 2}, timeout=60)
    with behind.writing(HERE, 0, arrays, CHUNKS) as pending:
        for buffer, number in [(buffer, number) for buffer in reversed(CHUNKS) for number in (2, 1, 0)]:
            with pending.chunk(buffer, number):  # the one that is copied: then its block is free
                assert behind.short_of_blocks >= {2}
            if (buffer, number) != (Buffer.WEIGHT, 0):
                with behind.changed:
                    assert behind.changed.wait_for(lambda: blocks_of(pending) == 1, timeout=60)
                assert blocks_of(behind._layers[HERE, 1]) == 0
    first.result(60)
    assert written(behind, arrays, 1) == as_bytes(arrays)
    second.result(60)
    assert not behind.short_of_blocks and behind.staging._lent == 0


def test_a_writer_that_fails_frees_what_waits_for_it(aside: ThreadPoolExecutor) -> None:
    behind, arrays = WriteBehind(0), home()
    waiting: list[Future[None]] = []

    def fail() -> None:
        with behind.writing(HERE, 0, arrays, CHUNKS):
            waiting.append(aside.submit(behind.capture, HERE, 0, arrays, CHUNKS))
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    waiting[0].result(60)
    assert not behind._layers


def test_layers_that_are_never_captured_do_not_add_up() -> None:
    behind, arrays = WriteBehind(0), home()

    def write(step: int, layer: int, *, to_be_captured: bool) -> None:
        here = Path(f"step-{step:06}.partial")
        with behind.writing(here, layer, arrays, CHUNKS, to_be_captured=to_be_captured):
            pass

    for step in range(3):
        write(step, layer=1, to_be_captured=False)  # files
    assert not behind._layers
    for step in range(3):  # after 0 steps without a graph, and checkpoints between them, which nobody captures
        write(step, layer=0, to_be_captured=True)
    assert not any(pending._chunks for pending in behind._layers.values())
    behind.capture(Path("step-000000.partial"), 0, arrays, CHUNKS)
    assert not behind._layers


def test_memory_that_the_kernel_refuses_is_no_room_and_stays_countable() -> None:
    blocks = Staging(2 * BLOCK_BYTES)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + BLOCK_BYTES // 2, limits[1]))
    try:
        refused = blocks.take()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert refused is None
    assert blocks.take() is not None and blocks.take() is not None and blocks.take() is None


def test_between_checkpoints_the_system_may_take_the_memory_and_what_it_has_not_taken_is_used_again(
    made: list[int],
) -> None:
    blocks = Staging(8 * BLOCK_BYTES)
    for _ in range(2):
        held = [blocks.take() for _ in range(8)]
        for block in held:
            assert block is not None
            block.data[:] = 1
            blocks.give(block)
        assert reclaimable_bytes() >= 8 * BLOCK_BYTES
    assert len(made) == 8


def test_a_kernel_that_cannot_leave_memory_to_itself_gets_it_back(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging.mmap, "MADV_FREE", 10_000)
    blocks = Staging(BLOCK_BYTES)
    for _ in range(2):
        block = blocks.take()
        assert block is not None
        blocks.give(block)
    assert len(made) == 2


def reclaimable_bytes() -> int:
    """Of this process, what the kernel takes when it lacks memory."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["LazyFree"].split()[0]) * 1024


def test_blocks_are_taken_from_a_machine_that_has_room_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counted them, but others may have taken the memory since: then the update waits."""
    blocks = Staging((BLOCKS_A_LOOK + 1) * BLOCK_BYTES)
    held = [blocks.take() for _ in range(BLOCKS_A_LOOK)]
    assert all(block is not None and block.data.nbytes == BLOCK_BYTES for block in held)
    monkeypatch.setattr(staging, "available_host_bytes", lambda: BLOCK_BYTES)
    assert blocks.take() is None
    for block in held:
        assert block is not None
        blocks.give(block)
    assert blocks.take() is None
    monkeypatch.undo()
    assert all(blocks.take() is not None for _ in range(BLOCKS_A_LOOK + 1)) and blocks.take() is None


def test_no_more_is_made_at_a_look_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "available_host_bytes", lambda: 3 * BLOCK_BYTES)
    blocks = Staging(100 * BLOCK_BYTES)
    assert all(blocks.take() is not None for _ in range(2))
    monkeypatch.setattr(staging, "available_host_bytes", lambda: BLOCK_BYTES)
    assert blocks.take() is None
