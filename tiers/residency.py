"""Which layer's bytes are where, as a pure state machine: no I/O, no waiting, no clock.

Whoever moves the bytes records each move here before and after it (`residency_guard`); a move that would lose an
update, read a stale shard or put two layers into one slot raises instead. When to move is the step graph's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tiers.arena_map import LayerHome
from tiers.errors import TierError


class Residency(StrEnum):
    """Where a part of a layer is."""

    ON_DISK = "on_disk"
    """Only on NVMe; holds no slot."""
    LOADING = "loading"
    """Holds a slot whose bytes are arriving."""
    RESIDENT = "resident"
    """In RAM. Where the part has a home on NVMe, the slot and the shard are equal."""
    DIRTY = "dirty"
    """The slot is newer than the shard."""
    STORING = "storing"
    """The slot is being written to the shard, which is not to be read now."""


class Part(StrEnum):
    """What moves together."""

    WEIGHTS = "weights"
    """What the device streams."""
    STATE = "state"
    """The master and the moments, as the optimizer updates them."""


class Move(StrEnum):
    """What may happen to a part of a layer."""

    BEGIN_LOAD = "begin_load"
    END_LOAD = "end_load"
    FAIL_LOAD = "fail_load"
    FILL = "fill"
    """The slot is written from elsewhere than the shard: initialised, imported or restored."""
    UPDATE = "update"
    BEGIN_STORE = "begin_store"
    END_STORE = "end_store"
    FAIL_STORE = "fail_store"
    EVICT = "evict"


TRANSITIONS: dict[tuple[Residency, Move], Residency] = {
    (Residency.ON_DISK, Move.BEGIN_LOAD): Residency.LOADING,
    (Residency.ON_DISK, Move.FILL): Residency.DIRTY,
    (Residency.LOADING, Move.END_LOAD): Residency.RESIDENT,
    (Residency.LOADING, Move.FAIL_LOAD): Residency.ON_DISK,
    (Residency.RESIDENT, Move.UPDATE): Residency.DIRTY,
    (Residency.RESIDENT, Move.EVICT): Residency.ON_DISK,
    (Residency.DIRTY, Move.UPDATE): Residency.DIRTY,
    (Residency.DIRTY, Move.BEGIN_STORE): Residency.STORING,
    (Residency.STORING, Move.END_STORE): Residency.RESIDENT,
    (Residency.STORING, Move.FAIL_STORE): Residency.DIRTY,
}
"""Every legal move; all others raise. A dirty part cannot be evicted: its update would be lost."""

CHANGES_CONTENT = frozenset({Move.FILL, Move.UPDATE})


class ResidencyTable:
    """Residency of every layer's weights and state, and who holds which slot.

    Parts that live in RAM are RESIDENT for ever and never move. Not thread-safe: the caller serialises.
    """

    def __init__(self, homes: Sequence[LayerHome]) -> None:
        """Start with everything that has a home on NVMe on disk."""
        self._slots: dict[tuple[int, Part], int] = {}
        self._states: dict[tuple[int, Part], Residency] = {}
        self._holders: dict[tuple[Part, int], int] = {}
        for layer, home in enumerate(homes):
            for part, slot in ((Part.WEIGHTS, home.weight_slot), (Part.STATE, home.state_slot)):
                self._states[layer, part] = Residency.RESIDENT if slot is None else Residency.ON_DISK
                if slot is not None:
                    self._slots[layer, part] = slot

    def residency(self, layer: int, part: Part) -> Residency:
        """Return where the part is."""
        return self._states[layer, part]

    def holder(self, part: Part, slot: int) -> int | None:
        """Return the layer whose bytes the slot holds, None where it is free."""
        return self._holders.get((part, slot))

    def make_room(self, layer: int) -> None:
        """Drop what the layer's streaming slot holds, maybe of another layer, unless it is still on its way."""
        holder = self.holder(Part.WEIGHTS, self._slots[layer, Part.WEIGHTS])
        if holder is not None and self._states[holder, Part.WEIGHTS] is Residency.RESIDENT:
            self.move(holder, Part.WEIGHTS, Move.EVICT)

    def move(self, layer: int, part: Part, move: Move) -> Residency:
        """Record a move and return where the part is now.

        Updating a layer's state makes a copy of its weights in a streaming slot stale; that copy is dropped.

        Raises:
            TierError: The move is illegal; nothing has changed.
        """
        refusal = self._refusal(layer, part, move)
        if refusal is not None:
            raise TierError(
                f"cannot {move} the {part} of layer {layer}, which is {self._states[layer, part]}: {refusal}"
            )
        new = TRANSITIONS[self._states[layer, part], move]
        self._set(layer, part, new)
        if part is Part.STATE and move in CHANGES_CONTENT and (layer, Part.WEIGHTS) in self._slots:
            self._set(layer, Part.WEIGHTS, Residency.ON_DISK)
        return new

    def _refusal(self, layer: int, part: Part, move: Move) -> str | None:
        if (layer, part) not in self._slots:
            return "it lives in RAM and never moves"
        state = self._states[layer, part]
        if (state, move) not in TRANSITIONS:
            legal = ", ".join(known for known in Move if (state, known) in TRANSITIONS)
            return f"possible are {legal}"
        if move in (Move.BEGIN_LOAD, Move.FILL):
            slot = self._slots[layer, part]
            holder = self._holders.get((part, slot))
            if holder is not None:
                return f"slot {slot} still holds layer {holder}, which is {self._states[holder, part]}"
        if part is Part.WEIGHTS:
            if move in (*CHANGES_CONTENT, Move.BEGIN_STORE):
                return "a streaming slot is only read; weights change through the state's master"
            master = self._states[layer, Part.STATE]
            if move is Move.BEGIN_LOAD and master in (Residency.DIRTY, Residency.STORING):
                return f"its shard is out of date, for its state is {master}"
        elif move in CHANGES_CONTENT and self._states.get((layer, Part.WEIGHTS)) is Residency.LOADING:
            return "its weights are being loaded and would be stale on arrival"
        return None

    def _set(self, layer: int, part: Part, residency: Residency) -> None:
        self._states[layer, part] = residency
        place = (part, self._slots[layer, part])
        if residency is not Residency.ON_DISK:
            self._holders[place] = layer
        elif self._holders.get(place) == layer:
            del self._holders[place]
