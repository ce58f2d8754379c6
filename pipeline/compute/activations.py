"""Boundary activations: the input of every layer, kept from forward to backward for each micro-batch.

Compute owns them. They stay on the device, or, for the first layers (whose backward comes last) and as far as the
arena has room for them, spill to pinned host memory right after they are made and come back one layer ahead of use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pipeline.compute.streams import Mark, Streams

MicroBatches = list[torch.Tensor]
"""One tensor a micro-batch, each [micro_batch, sequence, hidden] in the compute type."""


@dataclass
class _Boundary:
    """Inputs of one layer in one step."""

    tensors: MicroBatches
    """On the device; empty while they are only on the host."""
    spilled: Mark | None = None
    """When they were on the host; None where they stay on the device."""
    places: MicroBatches = field(default_factory=list)
    """Where on the host."""
    fetched: Mark | None = None
    """When they were back on the device."""


class Boundaries:
    """The boundary activations of the steps in flight. Used by the one thread that enqueues compute work."""

    def __init__(self, streams: Streams, room: torch.Tensor | None = None) -> None:
        """Start empty.

        Args:
            streams: Of this process.
            room: Pinned host memory to spill to, uint8 [bytes], owned by the tier; None keeps all on the device.
        """
        self._streams = streams
        self._room = room
        self._room_read: Mark | None = None
        self._kept: dict[tuple[int, int], _Boundary] = {}

    def keep(self, step: int, layer: int, tensors: MicroBatches, *, piece: int | None = None) -> None:
        """Take over the inputs of a layer, whose making is enqueued on the compute stream.

        Args:
            step: Of which they are.
            layer: Whose inputs.
            tensors: The inputs.
            piece: Number of the piece of the room to spill to, should it reach so far; None for inputs that stay.
        """
        assert (step, layer) not in self._kept
        boundary = self._kept[step, layer] = _Boundary(tensors)
        boundary.places = [] if piece is None else self._places(piece, tensors)
        if not boundary.places:
            return
        stream = self._streams.to_host
        stream.wait(self._streams.compute.mark())
        if self._room_read is not None:
            # Of the step before: by now its backward has been enqueued to the end.
            stream.wait(self._room_read)
        with stream.enqueue():
            for place, tensor in zip(boundary.places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
                stream.hold(tensor)
            boundary.spilled = stream.mark()

    def read(self, step: int, layer: int) -> MicroBatches:
        """Give the inputs of a layer to work on the compute stream; they are kept on."""
        self.prefetch(step, layer)
        boundary = self._kept[step, layer]
        if boundary.fetched is not None:
            self._streams.compute.wait(boundary.fetched)
        return boundary.tensors

    def leave(self, step: int, layer: int) -> None:
        """After a layer's forward: give up the device's copy of what is on the host."""
        boundary = self._kept[step, layer]
        if boundary.spilled is not None:
            boundary.tensors = []

    def prefetch(self, step: int, layer: int) -> None:
        """Enqueue the way back of a layer's inputs, so that it runs beside the compute work enqueued next."""
        boundary = self._kept.get((step, layer))
        if boundary is None or boundary.tensors or boundary.spilled is None:
            return
        compute, stream = self._streams.compute, self._streams.to_device
        with compute.enqueue():
            # Allocated for the compute stream, whose earlier work may still use the memory: hence the wait.
            boundary.tensors = [torch.empty_like(place, device=self._streams.device) for place in boundary.places]
        stream.wait(compute.mark())
        stream.wait(boundary.spilled)
        with stream.enqueue():
            for place, tensor in zip(boundary.places, boundary.tensors, strict=True):
                tensor.copy_(place, non_blocking=True)
                stream.hold(tensor)
            boundary.fetched = self._room_read = stream.mark()

    def take(self, step: int, layer: int) -> MicroBatches:
        """Hand the inputs of a layer over to its last reader on the compute stream; they are kept no longer."""
        tensors = self.read(step, layer)
        del self._kept[step, layer]
        return tensors

    def _places(self, piece: int, tensors: MicroBatches) -> MicroBatches:
        """Views of the room shaped like a decoder layer's inputs; none where there is no room."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        start = piece * num_bytes
        if self._room is None or start + num_bytes > self._room.nbytes:
            return []
        places: MicroBatches = []
        for tensor in tensors:
            places.append(self._room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        return places
