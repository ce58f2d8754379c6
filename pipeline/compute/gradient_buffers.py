"""Device memory that gradients pass through: fp32 sums over the micro-batches, then buffers on their way to the host.

A layer's gradient is summed in an *accumulator*, which is zero between layers. It leaves as the arena's gradient type
through one of a few *outgoing* buffers, so that the next layer's backward need not wait for the copy to the host, or
through a buffer of the layer's own, where it waits for the global norm when the host has no room for it, or when the
layer is updated on the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import Mark, Streams
from pipeline.messages import Lane
from tiers.layout import ELEMENTS_ALIGNMENT, LayerKind, LayerLayout, ModelLayout


class Accumulators:
    """fp32 sums of gradients: one for the layer at work, and one for a tied matrix.

    A tied matrix collects its gradient from the head to the embedding, right through the decoder layers. Of the other
    layers at most one is being summed at any time, and all share one buffer; or they take turns between two, where
    sums leave for the host and come back between the waves of a step.
    """

    def __init__(self, layout: ModelLayout, device: torch.device, in_turn: int = 1) -> None:
        """Allocate, all zeros.

        Args:
            layout: The model.
            device: Where the sums are made.
            in_turn: Buffers that layers take turns in, from the head down: 1 or 2.
        """
        head = len(layout.layers) - 1
        numel: dict[int, int] = {}
        self._number: dict[int, int] = {}
        for layer in layout.layers:
            own = in_turn if layout.tied else 0
            number = (head - layer.index) % in_turn if layer.kind is not LayerKind.EMBEDDING else own
            self._number[layer.index] = number
            numel[number] = max(numel.get(number, 0), layer.numel)
        self._buffers = {
            number: torch.zeros(size, dtype=torch.float32, device=device) for number, size in numel.items()
        }

    @property
    def num_bytes(self) -> int:
        """Device memory of the accumulators."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def number(self, layer: LayerLayout) -> int:
        """Of the buffer that a layer uses."""
        return self._number[layer.index]

    def of(self, layer: LayerLayout) -> torch.Tensor:
        """The accumulator that a layer uses, fp32 [layer.numel]."""
        return self._buffers[self._number[layer.index]][: layer.numel]


def sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat fp32 gradient, as an fp64 scalar of its device.

    Rows are summed in fp32 and the rows in fp64: a bf16 or an all-fp32 sum would lose small gradients of a large
    layer. No atomics, so the same input gives the same bits.

    Args:
        gradient: fp32 [n], n a multiple of ELEMENTS_ALIGNMENT.
    """
    rows: torch.Tensor = torch.linalg.vector_norm(gradient.view(-1, ELEMENTS_ALIGNMENT), dim=1)
    return rows.double().square_().sum()


@dataclass
class _Outgoing:
    """A buffer and what it waits for."""

    numel: int
    buffer: torch.Tensor | None = None
    """None while no gradient is in it, of a layer that is updated on the device."""
    holds: tuple[int, int] | None = None
    """(step, layer) of the gradient in it, until its copy to the host has been enqueued."""
    filled: Mark | None = None
    drained: Mark | None = None


class OutgoingGradients:
    """Buffers of finished gradients on their way to the host. `fill` and `drain` may run in different threads.

    Layers use the buffers in turn, from the head down, save those that hold theirs. The caller must have seen the
    `drain` of a buffer's last gradient return before it fills it again; the device waits for the end of that copy.
    """

    def __init__(
        self,
        layout: ModelLayout,
        count: int,
        dtype: torch.dtype,
        streams: Streams,
        held: Collection[int] = (),
        updated_here: Collection[int] = (),
    ) -> None:
        """Allocate `count` buffers of the arena's gradient type, each as large as the layers that use it.

        Args:
            layout: The model.
            count: Buffers that the layers use in turn.
            dtype: Of the gradients in the arena.
            streams: Of this process.
            held: Layers whose gradients wait on the device for the norm; each gets a buffer of its own.
            updated_here: Layers whose gradients do not leave; each has memory only from `fill` to `discard`, which
                layers that keep their graphs have in between.
        """
        self._streams = streams
        self._dtype = dtype
        self._updated_here = frozenset(updated_here)
        own = self._updated_here.union(held)
        last = len(layout.layers) - 1
        buffer_of = {layer.index: (last - layer.index) % count for layer in layout.layers if layer.index not in own}
        buffer_of |= {layer: count + rank for rank, layer in enumerate(sorted(own))}
        numel: dict[int, int] = {}
        for layer in layout.layers:
            buffer = buffer_of[layer.index]
            numel[buffer] = max(numel.get(buffer, 0), layer.numel)
        buffers = {buffer: _Outgoing(size) for buffer, size in numel.items()}
        self._buffers = {layer: buffers[buffer] for layer, buffer in buffer_of.items()}
        """By layer."""
        for index, outgoing in self._buffers.items():
            if index not in self._updated_here and outgoing.buffer is None:
                outgoing.buffer = self._memory(outgoing)

    def _memory(self, outgoing: _Outgoing) -> torch.Tensor:
        return torch.empty(outgoing.numel, dtype=self._dtype, device=self._streams.device)

    def _of(self, layer: int) -> _Outgoing:
        return self._buffers[layer]

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers that exist now."""
        distinct = {id(each): each.buffer for each in self._buffers.values()}.values()
        return sum(buffer.nbytes for buffer in distinct if buffer is not None)

    def fill(self, step: int, layer: int, accumulator: torch.Tensor) -> None:
        """Enqueue on the compute stream: convert a finished gradient into the layer's buffer, zero the accumulator.

        The memory of a gradient that does not leave is that stream's, and `discard` gives it back to it.

        Args:
            step: Number of the step.
            layer: Whose gradient it is.
            accumulator: Its fp32 sums, [layer.numel].
        """
        outgoing = self._of(layer)
        assert outgoing.holds is None, f"gradient of step, layer {outgoing.holds} would be overwritten by {step, layer}"
        if outgoing.drained is not None:
            self._streams.compute.wait(outgoing.drained)
        if outgoing.buffer is None:
            outgoing.buffer = self._memory(outgoing)
        outgoing.buffer[: accumulator.numel()].copy_(accumulator)
        accumulator.zero_()
        outgoing.filled = self._streams.compute.mark()
        outgoing.holds = (step, layer)

    def drain(self, step: int, layer: int, destination: torch.Tensor, spans: SpanRecorder) -> Mark:
        """Enqueue the copy of a filled buffer to the host, behind its filling, and give the buffer back.

        Args:
            step: As given to `fill`.
            layer: As given to `fill`.
            destination: The layer's gradient in the arena, [layer.numel] on the host.
            spans: Receives the copy's span.

        Returns:
            The mark at which all bytes are in `destination`; nobody may read it before.
        """
        outgoing = self._of(layer)
        assert outgoing.holds == (step, layer) and outgoing.buffer is not None, f"no gradient of {step, layer} is ready"
        assert outgoing.filled is not None
        stream = self._streams.to_host
        with stream.enqueue():
            stream.wait(outgoing.filled)
            with spans.span(f"offload[{layer}]", Lane.D2H, stream, destination.nbytes):
                destination.copy_(outgoing.buffer[: destination.numel()], non_blocking=True)
            landed = outgoing.drained = stream.mark()
        outgoing.holds = None
        return landed

    def read(self, step: int, layer: int) -> torch.Tensor:
        """A finished gradient [layer.numel] for work on the compute stream, which `discard` follows."""
        outgoing = self._of(layer)
        assert outgoing.holds == (step, layer) and outgoing.buffer is not None, f"no gradient of {step, layer} is ready"
        return outgoing.buffer

    def discard(self, step: int, layer: int) -> None:
        """Give a filled buffer back without copying it: its gradient has been used on the device, or is not needed."""
        outgoing = self._of(layer)
        assert outgoing.holds == (step, layer), f"no gradient of {step, layer} is ready"
        outgoing.holds = None
        if layer in self._updated_here:
            outgoing.buffer = None
