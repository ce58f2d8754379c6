"""Memory for what a checkpoint still lacks when training must go on: blocks of one size, taken as needed, never all
of a state.

Blocks are made when they are asked for, and left to the system as soon as none is in use (MADV_FREE): it counts them
as available and takes their pages when it lacks memory. Those that it has not taken by the next checkpoint are filled
at the speed of memory, fresh ones at a fraction of it, for every page must be found and cleared: two threads of a
virtual machine copied 10 and 16 GB/s into pages left so, 0.4 to 2 GB/s into new ones.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tiers.checksum import ByteArray
from tiers.direct_io import MAX_BLOCK_BYTES
from tiers.host_memory import GIB, available_host_bytes

BLOCK_BYTES = MAX_BLOCK_BYTES
"""No chunk of a shard is larger, and few are much smaller."""
BLOCKS_A_LOOK = 16
"""Made between two looks at what memory the machine has left, which takes up to a millisecond, as long as to copy a
block."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """BLOCK_BYTES of memory."""

    data: ByteArray
    memory: mmap.mmap


class Staging:
    """At most so many bytes of blocks. Not thread-safe: the owner calls it under a lock."""

    def __init__(self, num_bytes: int) -> None:
        """Hold nothing yet.

        Args:
            num_bytes: The most to hold; what is less than a block of it is not used.
        """
        self._most_blocks = num_bytes // BLOCK_BYTES
        self._lent = 0
        self._seen_room = 0
        """Blocks that the machine had memory for at the last look and that were not lent since."""
        self._free: list[Block] = []
        """Given back while others are in use."""
        self._left: list[Block] = []
        """To the system: they may have no pages any more."""

    def take(self) -> Block | None:
        """A block that is the caller's until `give`; None where there is no room, now or ever."""
        if self._free:
            block = self._free.pop()
        elif self._lent == self._most_blocks:
            return None
        else:
            self._seen_room = self._seen_room or min(BLOCKS_A_LOOK, _blocks_with_room())
            if not self._seen_room:
                return None
            try:
                block = self._left.pop() if self._left else _block()
            except OSError:  # a limit that the machine's free memory does not show: ulimit -v, mappings of a process
                self._seen_room = 0
                return None
            self._seen_room -= 1
        self._lent += 1
        return block

    def give(self, block: Block) -> None:
        """Take a block back."""
        self._lent -= 1
        self._free.append(block)
        if not self._lent:
            with suppress(OSError):  # EINVAL where the kernel cannot: then they go altogether
                for free in self._free:
                    free.memory.madvise(mmap.MADV_FREE)
                    self._left.append(free)
            self._free.clear()
            self._seen_room = 0


def _blocks_with_room() -> int:
    """Blocks that the machine has memory for now: the plan counted them, others may have taken it since.

    What is left free holds those that were made before and not yet filled, one a thread, which no look can see.
    """
    available = available_host_bytes()
    return max(0, available - min(GIB, available // 8)) // BLOCK_BYTES


def _block() -> Block:
    memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fewer faults to fill it, fewer pieces to write it; EINVAL from a kernel without huge pages.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return Block(np.frombuffer(memory, np.uint8), memory)
