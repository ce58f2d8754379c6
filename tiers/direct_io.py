"""O_DIRECT transfers between page-aligned memory and files, many requests in flight, every block summed by crc32c.

The page cache would copy every byte once more and hold a second copy of the model in memory; O_DIRECT does neither.
Who decides whether a directory can do it is `preflight`, before a run, never a failing call in the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tiers.bounce_blocks import BounceBlocks
from tiers.checksum import ByteArray
from tiers.direct_file import DirectMode, read_block, reading, sync_descriptor, write_block, writing
from tiers.io_threads import IoThreads
from tiers.layout import PAGE_BYTES

MAX_BLOCK_BYTES = 16 << 20
"""One request. A few of these in flight saturate a drive; the bounce memory of a copy is one a request."""

SUMMING_THREADS = 2
"""Beyond one a request: while a thread sums a block it has none in flight, and the drive would wait for it. On a drive
of 8 GB/s writes came to 80 % of raw without them, and to 94 % with them."""

MOST_BOUNCE_BLOCKS = 10
"""Requests of a copy in flight, however many threads there are: as many as 8 requests and their summing threads need,
and 160 MiB, which the plan's account of the tier's actors has room for."""


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Memory, cut in blocks that lie at given places of a file. The caller owns the memory and keeps it until return.

    `data` is uint8, page-aligned, a whole number of pages; the last block may be shorter than `block_bytes`.
    """

    path: Path
    mode: DirectMode
    data: ByteArray
    offsets: Sequence[int]
    """Byte offset in the file of each block, page-aligned."""
    block_bytes: int
    lend: Callable[[int], AbstractContextManager[ByteArray]] | None = None
    """Where blocks to write may move while others are written: gives one by its number, in place of `data`."""

    def __post_init__(self) -> None:
        assert self.data.ctypes.data % PAGE_BYTES == 0, "O_DIRECT memory must start at a page"
        assert self.data.size % PAGE_BYTES == 0 and self.block_bytes % PAGE_BYTES == 0, "O_DIRECT moves whole pages"
        assert len(self.offsets) == -(-self.data.size // self.block_bytes)

    def block(self, number: int) -> ByteArray:
        """The memory of one block."""
        return self.data[number * self.block_bytes : (number + 1) * self.block_bytes]

    def lent(self, number: int) -> AbstractContextManager[ByteArray]:
        """The memory of one block while it is written."""
        return nullcontext(self.block(number)) if self.lend is None else self.lend(number)


class DirectIO:
    """Threads that move blocks. Thread-safe; belongs to the process that made it (threads do not survive a fork)."""

    def __init__(self, requests: int) -> None:
        """Start the threads as there is work.

        Args:
            requests: To keep in flight.
        """
        self._threads = IoThreads(requests + SUMMING_THREADS)
        self._bounce = BounceBlocks(MOST_BOUNCE_BLOCKS, MAX_BLOCK_BYTES)

    def __enter__(self) -> DirectIO:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for who is at work, and end the threads; whoever comes later is refused. May be called twice."""
        self._threads.close()
        self._bounce.clear()

    def read(self, files: Sequence[FileBlocks]) -> list[tuple[int, ...]]:
        """Fill the memory of all `files` from disk; return the crc32c of every block, file by file.

        Raises:
            ShardError: A file is missing, ends early, is being written, or the read failed; path and errno are named.
        """
        with self._threads.in_use(), ExitStack() as stack:
            descriptors = [stack.enter_context(reading(file.path, file.mode)) for file in files]
            return self._threads.run(
                [
                    [_bind(read_block, fd, file.path, file.block(i), offset) for i, offset in enumerate(file.offsets)]
                    for fd, file in zip(descriptors, files, strict=True)
                ]
            )

    def write(self, files: Sequence[FileBlocks], *, sync: bool) -> list[tuple[int, ...]]:
        """Write the memory of all `files` over existing, preallocated files; return the crc32c of every block.

        Args:
            files: Blocks to write; the memory must not change until this returns.
            sync: Whether to fsync each file: yes where it must outlive a crash, no for scratch.

        Raises:
            ShardError: The disk is full, another writer has the file, or the write failed; path and errno are named.
        """
        with self._threads.in_use(), ExitStack() as stack:
            descriptors = [stack.enter_context(writing(file.path, file.mode)) for file in files]
            sums = self._threads.run(
                [
                    [_bind(_write_lent, fd, file, number, offset) for number, offset in enumerate(file.offsets)]
                    for fd, file in zip(descriptors, files, strict=True)
                ]
            )
            if sync:
                self._threads.run(
                    [[_bind(sync_descriptor, fd, file.path)] for fd, file in zip(descriptors, files, strict=True)]
                )
            return sums

    def copy(
        self, source: Path, source_mode: DirectMode, target: Path, target_mode: DirectMode, num_bytes: int, block: int
    ) -> tuple[int, ...]:
        """Copy the first `num_bytes` of `source` over the preallocated `target`, fsync it; return each block's crc32c.

        Goes through bounce blocks, so that no arena slot is needed. Raises like `read` and `write`, and HostMemoryError
        where the system has no memory for them.
        """
        with (
            self._threads.in_use(),
            reading(source, source_mode) as source_fd,
            writing(target, target_mode) as target_fd,
        ):

            def move(offset: int) -> int:
                with self._bounce.lent() as bounce:
                    memory = bounce[: min(block, num_bytes - offset)]
                    crc = read_block(source_fd, source, memory, offset)
                    write_block(target_fd, target, memory, offset)
                return crc

            (sums,) = self._threads.run([[_bind(move, offset) for offset in range(0, num_bytes, block)]])
            sync_descriptor(target_fd, target)
            return sums

    def scan(self, path: Path, mode: DirectMode, num_bytes: int, block: int) -> tuple[int, ...]:
        """Crc32c of each block of the first `num_bytes` (whole pages) of a file. Raises like `copy`."""
        with self._threads.in_use(), reading(path, mode) as fd:

            def check(offset: int) -> int:
                with self._bounce.lent() as memory:
                    return read_block(fd, path, memory[: min(block, num_bytes - offset)], offset)

            (sums,) = self._threads.run([[_bind(check, offset) for offset in range(0, num_bytes, block)]])
            return sums


def _write_lent(descriptor: int, file: FileBlocks, number: int, offset: int) -> int:
    with file.lent(number) as memory:
        return write_block(descriptor, file.path, memory, offset)


def _bind(function: Callable[..., int], *arguments: object) -> Callable[[], int]:
    return lambda: function(*arguments)
