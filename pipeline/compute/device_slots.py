"""Device memory that weights stream through: a few slots, each filled on one stream and read on another.

Compute owns the slots for the life of the process. What a slot holds is known from its last `stage`; the device, not
the host, makes a copy wait for the slot's last reader and a reader wait for its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import Mark, Streams
from pipeline.messages import Lane
from pipeline.step.operations import EMBEDDING_SLOT, HEAD_SLOT
from tiers.layout import LayerKind, ModelLayout


class _Slot:
    """One buffer of the device and who used it last."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.layer: int | None = None
        self.filled: Mark | None = None
        self.read: Mark | None = None
        self.newest = False
        """Whether the layer was updated here and the arena may still hold older weights."""


class WeightSlots:
    """The device slots: for decoder layers in turn, for those that have their own, for the embedding and for the head.

    When the head is not tied to the embedding the two share memory: the embedding is read by the first operation of
    a step and the head by one in its middle. When it is tied, the embedding matrix stays from the one to the other.
    """

    def __init__(
        self,
        layout: ModelLayout,
        decoder_slots: int,
        weights: Sequence[torch.Tensor],
        streams: Streams,
        own_slots: int = 0,
    ) -> None:
        """Allocate the slots.

        Args:
            layout: The model.
            decoder_slots: 1 or more; 2 let a layer stream in while another computes.
            weights: By layer, its flat weights in the arena, [numel] on the host; owned by the tier.
            streams: Of this process.
            own_slots: Decoder layers that have a slot each, beside those that are shared.
        """
        self._weights = weights
        self._streams = streams

        def slot(kinds: set[LayerKind]) -> _Slot:
            numel = max(layer.numel for layer in layout.layers if layer.kind in kinds)
            return _Slot(torch.zeros(numel, dtype=weights[0].dtype, device=streams.device))

        self._slots = {number: slot({LayerKind.DECODER}) for number in range(decoder_slots + own_slots)}
        if layout.tied:
            self._slots[EMBEDDING_SLOT] = slot({LayerKind.EMBEDDING})
            self._slots[HEAD_SLOT] = slot({LayerKind.HEAD})
        else:
            shared = slot({LayerKind.EMBEDDING, LayerKind.HEAD})
            self._slots[EMBEDDING_SLOT] = self._slots[HEAD_SLOT] = shared

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(slot.buffer.nbytes for slot in set(self._slots.values()))

    def buffer(self, slot: int) -> torch.Tensor:
        """The whole flat buffer of a slot, to bind views of it; its contents belong to `reading`."""
        return self._slots[slot].buffer

    def stage(self, layer: int, slot: int, spans: SpanRecorder) -> Mark | None:
        """Enqueue the copy of a layer's weights into a slot, behind the slot's last reader.

        Nothing is copied where the layer was updated in this slot and lies there yet. The caller must have seen the
        last reader's operation return.

        Returns:
            The mark at which the arena has been read; None where nothing was copied.
        """
        target, source = self._slots[slot], self._weights[layer]
        if target.newest and target.layer == layer:
            return None
        target.newest = False
        stream = self._streams.to_device
        with stream.enqueue():
            if target.read is not None:
                stream.wait(target.read)
            with spans.span(f"stage[{layer}]", Lane.H2D, stream, source.nbytes):
                target.buffer[: source.numel()].copy_(source, non_blocking=True)
            target.filled, target.layer = stream.mark(), layer
        return target.filled

    @contextmanager
    def reading(self, layer: int, slot: int) -> Iterator[torch.Tensor]:
        """Give the flat weights [numel] of a staged layer to work that is enqueued on the compute stream inside."""
        held = self._slots[slot]
        assert held.filled is not None and held.layer == layer, f"slot {slot} holds {held.layer}, not layer {layer}"
        self._streams.compute.wait(held.filled)
        yield held.buffer[: self._weights[layer].numel()]
        held.read = self._streams.compute.mark()

    @contextmanager
    def updating(self, layer: int, slot: int) -> Iterator[torch.Tensor]:
        """Like `reading`, for work that changes the weights: this slot then holds the newest there are."""
        with self.reading(layer, slot) as weights:
            yield weights
        self._slots[slot].newest = True

    def updated(self, layer: int, slot: int) -> torch.Tensor:
        """Give the flat weights [numel] of a layer that was updated in its slot, to be copied to the arena."""
        held = self._slots[slot]
        assert held.newest and held.layer == layer, f"layer {layer} was not updated in slot {slot}"
        return held.buffer[: self._weights[layer].numel()]
