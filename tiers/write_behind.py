"""Layers on their way into a checkpoint, read where they live for as long as they may stay there.

A layer is written chunk by chunk straight from the arena. When its next update is due, `capture` copies what is not
written yet aside, as far as there is staging memory, and waits for the rest: from then on the layer may change, and the
writing goes on from the copies. What the drive takes in time is never copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from pathlib import Path

import numpy as np

from tiers.checksum import ByteArray
from tiers.layout import Buffer
from tiers.shard_store import StorageArray
from tiers.staging import BLOCK_BYTES, Block, Staging


class _State(Enum):
    AT_HOME = auto()
    """Nobody has read the chunk yet; it lies in the arena."""
    COPYING = auto()
    BEING_READ = auto()
    """Out of the arena, by who writes it."""
    COPIED = auto()
    WRITTEN = auto()


@dataclass
class _Chunk:
    memory: ByteArray
    """In the arena, or at the beginning of a staging block once it is COPIED."""
    state: _State = _State.AT_HOME
    block: Block | None = None
    """Of the staging memory, where the chunk has been copied."""


class PendingLayer:
    """The chunks of one layer's buffers in RAM. Thread-safe."""

    def __init__(
        self, arrays: Mapping[Buffer, StorageArray], chunk_bytes: Mapping[Buffer, int], owner: WriteBehind
    ) -> None:
        assert all(num_bytes <= BLOCK_BYTES for num_bytes in chunk_bytes.values())
        self._owner = owner
        self._chunks = {buffer: _cut(array, chunk_bytes[buffer]) for buffer, array in arrays.items()}
        self.turn = 0
        """Of its capture among all: the layer that was captured first is needed first."""
        self.captured = False
        self.written = False

    @contextmanager
    def chunk(self, buffer: Buffer, number: int) -> Iterator[ByteArray]:
        """The bytes of a chunk, wherever they are, to be written within the context: it counts as written after it."""
        changed, chunk = self._owner.changed, self._chunks[buffer][number]
        with changed:
            changed.wait_for(lambda: chunk.state is not _State.COPYING)
            if chunk.state is _State.AT_HOME:
                chunk.state = _State.BEING_READ
        try:
            yield chunk.memory
        finally:
            with changed:
                self._release(chunk)
                changed.notify_all()

    def capture(self) -> None:
        """Return when nothing of the layer must be read from its home any more.

        The last chunks first: the first ones are about to be written.
        """
        for chunk in [chunk for chunks in reversed(self._chunks.values()) for chunk in reversed(chunks)]:
            block = self._block_for(chunk)
            if block is None:
                continue
            copy = block.data[: chunk.memory.size]
            np.copyto(copy, chunk.memory)
            with self._owner.changed:
                chunk.memory, chunk.state = copy, _State.COPIED
                if self.written:
                    self._release(chunk)
                self._owner.changed.notify_all()

    def release(self) -> None:
        """Say that nobody reads the layer any more, whether all of it was written or an error has ended it."""
        with self._owner.changed:
            self.written = True
            for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
                # One that is being copied is released by who copies it.
                if chunk.state is not _State.COPYING:
                    self._release(chunk)
            self._chunks = {}  # many, and this may stay until a later checkpoint
            self._owner.changed.notify_all()

    def _block_for(self, chunk: _Chunk) -> Block | None:
        """A block to copy the chunk to, which is then COPYING; None once its home is free without that."""
        changed, short_of_blocks = self._owner.changed, self._owner.short_of_blocks
        with changed:
            while chunk.state in (_State.AT_HOME, _State.BEING_READ):
                if chunk.state is _State.AT_HOME:
                    if self.turn <= min(short_of_blocks, default=self.turn):
                        chunk.block = self._owner.staging.take()
                    if chunk.block is not None:
                        chunk.state = _State.COPYING
                        break
                    short_of_blocks.add(self.turn)
                changed.wait()
            if self.turn in short_of_blocks:
                short_of_blocks.remove(self.turn)
                changed.notify_all()
        return chunk.block if chunk.state is _State.COPYING else None

    def _release(self, chunk: _Chunk) -> None:
        if chunk.block is not None:
            self._owner.staging.give(chunk.block)
        chunk.block, chunk.memory, chunk.state = None, _NOTHING, _State.WRITTEN


class WriteBehind:
    """The layers that checkpoints are still reading, by the checkpoint's directory and the layer's number."""

    def __init__(self, staging_bytes: int) -> None:
        """Hold at most `staging_bytes` of copies."""
        self.changed = threading.Condition()
        self.staging = Staging(staging_bytes)
        self.short_of_blocks: set[int] = set()
        """Turns of the layers whose capture waits for a block."""
        self._turns = count(1)
        self._layers: dict[tuple[Path, int], PendingLayer] = {}

    @contextmanager
    def writing(
        self,
        directory: Path,
        layer: int,
        arrays: Mapping[Buffer, StorageArray],
        chunk_bytes: Mapping[Buffer, int],
        *,
        to_be_captured: bool = True,
    ) -> Iterator[PendingLayer]:
        """Around the writing of a layer, which may have been captured before it begins.

        Args:
            directory: Of the checkpoint.
            layer: The layer's number.
            arrays: Its buffers in RAM.
            chunk_bytes: Size of a chunk of each.
            to_be_captured: Whether a `capture` may come, before or after.
        """
        with self.changed:
            found = self._layers.get((directory, layer))
            if found is None or found.written:
                found = self._layers[directory, layer] = PendingLayer(arrays, chunk_bytes, self)
            found.captured |= not to_be_captured
        try:
            yield found
        finally:
            found.release()
            self._forget(directory, layer, found)

    def capture(
        self, directory: Path, layer: int, arrays: Mapping[Buffer, StorageArray], chunk_bytes: Mapping[Buffer, int]
    ) -> None:
        """See to it that a layer's home may change, whether its writing is over, under way, or has yet to begin.

        Called once a layer of a checkpoint, at any time after what it holds is there, in the order of the checkpoints.
        """
        with self.changed:
            found = self._layers.setdefault((directory, layer), PendingLayer(arrays, chunk_bytes, self))
            found.turn = next(self._turns)
        found.capture()
        with self.changed:
            found.captured = True
            # Other checkpoints of it that were written by now lie between steps, and are not captured any more.
            for key in [key for key, other in self._layers.items() if key[1] == layer and other.written]:
                if key[0] != directory:
                    del self._layers[key]
        self._forget(directory, layer, found)

    def _forget(self, directory: Path, layer: int, pending: PendingLayer) -> None:
        """Both have come; the last layers of a run are never captured and stay, without memory."""
        with self.changed:
            if pending.captured and pending.written and self._layers.get((directory, layer)) is pending:
                del self._layers[directory, layer]


_NOTHING = np.empty(0, np.uint8)


def _cut(array: StorageArray, chunk_bytes: int) -> list[_Chunk]:
    data = array.view(np.uint8)
    return [_Chunk(data[start : start + chunk_bytes]) for start in range(0, data.size, chunk_bytes)]
