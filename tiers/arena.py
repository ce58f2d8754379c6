"""The arena: one anonymous shared-memory file that holds every byte of model state in RAM.

The ParameterTier actor owns it; every other process attaches through `/proc/<pid>/fd/<n>`. Nothing is left behind
when the owner dies, by whatever signal, and the size of /dev/shm does not bound it. No CUDA here: Compute registers
the address itself.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.arena_map import Extent
from tiers.errors import HostMemoryError, TierError
from tiers.host_memory import available_host_bytes, require_host_memory
from tiers.layout import PAGE_BYTES, round_up
from tiers.processors import usable_cores
from tiers.quantities import shown_bytes

__all__ = ["Arena", "ArenaHandle", "available_host_bytes", "populate"]

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; Python 3.13 does not name it."""

POPULATE_CHUNK_BYTES = 256 * 2**20
"""Work of one call: 4 GiB/s a thread makes it 60 ms, so progress is smooth and the calls are few."""

ARENA_NAME = "megatrain-arena"
"""Of the shared memory, as /proc shows it."""

ByteArray = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with (bytes populated, bytes in all) from the thread that creates the arena."""

logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process of this machine needs to attach."""

    path: str
    """`/proc/<pid of the owner>/fd/<n>`."""
    num_bytes: int


class Arena:
    """A mapping of the shared memory, in its owner or in a process that attached.

    Views stay valid after `close`: the mapping goes with the last of them.
    """

    def __init__(self, file_descriptor: int, num_bytes: int, *, owned: bool) -> None:
        """Map an open memfd; use `create` or `attach`. Takes ownership of the descriptor."""
        self.num_bytes = num_bytes
        self._handle = ArenaHandle(f"/proc/{os.getpid()}/fd/{file_descriptor}", num_bytes) if owned else None
        self._file_descriptor: int | None = file_descriptor
        # The array is the only owner of the mmap object, so that views keep the mapping and nothing else does.
        memory = mmap.mmap(file_descriptor, num_bytes)
        # Given where `shared_memory_has_huge_pages`; EINVAL from a kernel without any.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: ByteArray | None = np.frombuffer(memory, np.uint8)
        self.address: int = self._bytes.ctypes.data
        """Where the mapping starts in this process, page-aligned: for cudaHostRegister."""
        if not owned:
            self._close_descriptor()

    @classmethod
    def create(
        cls,
        num_bytes: int,
        *,
        limit_bytes: int | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Arena:
        """Allocate zeroed shared memory and make every page of it resident.

        Args:
            num_bytes: Size, rounded up to whole pages.
            limit_bytes: The recipe's `[memory] ram_gib` in bytes.
            threads: Threads that populate; None for every core that this process may use.
            progress: Called as pages become resident.

        Raises:
            HostMemoryError: Passes the recipe's limit, the machine's free memory or a cgroup limit.
        """
        num_bytes = round_up(max(num_bytes, 1), PAGE_BYTES)
        require_host_memory(num_bytes, limit_bytes)
        file_descriptor = os.memfd_create(ARENA_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(file_descriptor, num_bytes)
            arena = cls(file_descriptor, num_bytes, owned=True)
        except OSError as error:
            os.close(file_descriptor)
            raise HostMemoryError(f"cannot map an arena of {shown_bytes(num_bytes)}: {error}") from error
        try:
            populate(arena.bytes_view(0, num_bytes), threads=threads, progress=progress)
        except BaseException:
            arena.close()
            raise
        return arena

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map the arena of another process of this machine.

        Raises:
            TierError: The owner is gone, belongs to another user, or the path is no longer this arena.
        """
        attempt = f"cannot attach to the arena {handle.path}"
        try:
            file_descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise TierError(
                f"{attempt}: the process that owns it is gone or runs on another machine; "
                "start the run again, with all actors on one node"
            ) from error
        except PermissionError as error:
            raise TierError(f"{attempt}: permission denied; run all actors as the same user") from error
        size, target = os.fstat(file_descriptor).st_size, Path(f"/proc/self/fd/{file_descriptor}").readlink()
        # A process that came later may have been given the number of an owner that is gone.
        if size != handle.num_bytes or f"memfd:{ARENA_NAME}" not in str(target):
            os.close(file_descriptor)
            raise TierError(
                f"{attempt}: expected {handle.num_bytes} bytes of shared memory, found {target} of {size} bytes"
            )
        return cls(file_descriptor, size, owned=False)

    def handle(self) -> ArenaHandle:
        """Return what others attach with; valid while this process lives and `close` was not called."""
        assert self._handle is not None and self._bytes is not None, "only the open arena of its owner has a handle"
        return self._handle

    def view(self, extent: Extent) -> npt.NDArray[Any]:
        """Return the extent's elements, writable, in the storage dtype (uint16 for bfloat16)."""
        return self.bytes_view(extent.offset_bytes, extent.num_bytes).view(extent.element.storage)

    def bytes_view(self, offset_bytes: int, num_bytes: int) -> ByteArray:
        """Return a writable view of raw bytes."""
        assert self._bytes is not None, "the arena is closed"
        assert offset_bytes >= 0 and num_bytes >= 0 and offset_bytes + num_bytes <= self.num_bytes, (
            f"bytes {offset_bytes} to {offset_bytes + num_bytes} lie outside the arena of {self.num_bytes}"
        )
        return self._bytes[offset_bytes : offset_bytes + num_bytes]

    def close(self) -> None:
        """Let go of the memory; it is freed once no process maps it and no view is left. May be called twice."""
        self._bytes = None
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def populate(
    pages: ByteArray, *, threads: int | None = None, progress: Progress | None = None, advice: int = MADV_POPULATE_WRITE
) -> None:
    """Make freshly mapped, page-aligned, zero memory resident for writing.

    Args:
        pages: Whole pages of a shared mapping that nobody has written yet.
        threads: Threads that share the work; None for every core that this process may use.
        progress: Called as chunks become resident.
        advice: What madvise is asked. A kernel that does not know it makes each page be touched instead.

    Raises:
        HostMemoryError: The kernel has no page left to give.
    """
    starts = range(0, pages.nbytes, POPULATE_CHUNK_BYTES)
    chunks = [pages[start : start + POPULATE_CHUNK_BYTES] for start in starts]
    done_bytes, touched = 0, False
    workers = min(threads or usable_cores(), len(chunks))
    with ThreadPoolExecutor(workers, thread_name_prefix="populate") as executor:
        futures = {executor.submit(_populate_chunk, chunk, advice): chunk.nbytes for chunk in chunks}
        try:
            for future in as_completed(futures):
                touched |= future.result()
                done_bytes += futures[future]
                if progress is not None:
                    progress(done_bytes, pages.nbytes)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    if touched:
        logger.warning(
            "this kernel has no MADV_POPULATE_WRITE (Linux 5.14): the arena was populated by touching its pages; "
            "memory that runs out while this happens kills the process instead of raising an error"
        )


def _populate_chunk(chunk: ByteArray, advice: int) -> bool:
    """Populate one chunk; return whether its pages had to be touched."""
    address, length = ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes)
    # ctypes gives up the GIL during the call, so that threads populate side by side.
    while _libc.madvise(address, length, advice) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            chunk[::PAGE_BYTES] = 0
            return True
        if code not in (errno.EINTR, errno.EAGAIN):
            raise HostMemoryError(
                f"the kernel could not populate {chunk.nbytes} bytes of the arena: {os.strerror(code)}, with "
                f"{shown_bytes(available_host_bytes())} still available; lower [memory] ram_gib or set nvme_dir"
            )
    return False
