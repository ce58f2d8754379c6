"""Holds the Prefetcher's calls against the residency table: what would lose an update or misread a shard raises.

The step graph alone orders the calls; this notices where it slipped, from whichever threads they come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiers.arena_map import LayerHome
from tiers.residency import Move, Part, Residency, ResidencyTable


class ResidencyGuard:
    """Records moves before and after they happen. Thread-safe."""

    def __init__(self, homes: Sequence[LayerHome]) -> None:
        """Start with everything that has a home on NVMe on disk."""
        self._table = ResidencyTable(homes)
        self._lock = threading.Lock()

    @contextmanager
    def loading(self, layer: int, part: Part) -> Iterator[None]:
        """Around the filling of a slot from NVMe. Weights in a slot are only read, and make room for others.

        Raises:
            TierError: The shard is out of date, or the slot holds what may not go.
        """
        with self._lock:
            if part is Part.WEIGHTS:
                self._table.make_room(layer)
            self._table.move(layer, part, Move.BEGIN_LOAD)
        try:
            yield
        except BaseException:
            self._move(layer, part, Move.FAIL_LOAD)
            raise
        self._move(layer, part, Move.END_LOAD)

    @contextmanager
    def storing(self, layer: int) -> Iterator[None]:
        """Around the store of a state that was loaded and updated, or filled from elsewhere. Its slot is free then.

        Raises:
            TierError: The slot holds another layer, or the layer's weights are being loaded and would be stale.
        """
        with self._lock:
            loaded = self._table.residency(layer, Part.STATE) is not Residency.ON_DISK
            self._table.move(layer, Part.STATE, Move.UPDATE if loaded else Move.FILL)
            self._table.move(layer, Part.STATE, Move.BEGIN_STORE)
        try:
            yield
        except BaseException:
            self._move(layer, Part.STATE, Move.FAIL_STORE)
            raise
        self._move(layer, Part.STATE, Move.END_STORE, Move.EVICT)

    def release_state(self, layer: int) -> None:
        """Free the slot of a state that was only read.

        Raises:
            TierError: The slot does not hold it, or holds an update that is not stored.
        """
        self._move(layer, Part.STATE, Move.EVICT)

    def _move(self, layer: int, part: Part, *moves: Move) -> None:
        with self._lock:
            for move in moves:
                self._table.move(layer, part, move)
