"""Memory that bytes pass through on their way from file to file, bounded whatever the number of threads."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tiers.checksum import ByteArray
from tiers.errors import HostMemoryError


class BounceBlocks:
    """At most so many blocks, made as they are needed and kept for the next copy. Thread-safe."""

    def __init__(self, most: int, block_bytes: int) -> None:
        """Hold nothing yet."""
        self._block_bytes = block_bytes
        self._permits = threading.BoundedSemaphore(most)
        self._free: list[ByteArray] = []

    @contextmanager
    def lent(self) -> Iterator[ByteArray]:
        """A block for the caller alone within the context, once one is free.

        Raises:
            HostMemoryError: The system gives no memory.
        """
        with self._permits:
            try:
                block = self._free.pop()
            except IndexError:
                block = anonymous_memory(self._block_bytes)
            try:
                yield block
            finally:
                self._free.append(block)

    def clear(self) -> None:
        """Give the memory back to the system."""
        self._free.clear()


def anonymous_memory(num_bytes: int) -> ByteArray:
    """Zero memory that starts at a page; freed once no array uses it.

    Raises:
        HostMemoryError: The system gives none.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    except OSError as error:
        raise HostMemoryError(
            f"the system gives no {num_bytes:,} bytes to move data through: {error.strerror}; "
            "lower memory.ram_gib, or raise the limit (ulimit -v)"
        ) from error
