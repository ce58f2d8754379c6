"""Device memory that gradients pass through: fp32 sums over the micro-batches, then buffers on their way to the host.

A layer's gradient is summed in an *accumulator*, which is zero between layers. It leaves as the arena's gradient type
through one of a few *outgoing* buffers, so that the next layer's backward need not wait for the copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.messages import Lane
from pipeline.spans import SpanRecorder
from pipeline.streams import Mark, Streams
from tiers.layout import ELEMENTS_ALIGNMENT, LayerKind, LayerLayout, ModelLayout


class Accumulators:
    """fp32 sums of gradients: one for the decoder layer at work, one for the layers of the vocabulary.

    A tied matrix collects its gradient from the head to the embedding, right through the decoder layers. Otherwise at
    most one layer is being summed at any time, and all share one buffer.
    """

    def __init__(self, layout: ModelLayout, device: torch.device) -> None:
        def zeros(layers: list[LayerLayout]) -> torch.Tensor:
            return torch.zeros(max(layer.numel for layer in layers), dtype=torch.float32, device=device)

        if layout.tied:
            others = zeros([layer for layer in layout.layers if layer.kind is not LayerKind.EMBEDDING])
            self._buffers = dict.fromkeys(LayerKind, others)
            self._buffers[LayerKind.EMBEDDING] = zeros([layout.layers[0]])
        else:
            shared = zeros(list(layout.layers))
            self._buffers = dict.fromkeys(LayerKind, shared)

    @property
    def num_bytes(self) -> int:
        """Device memory of the accumulators."""
        return sum(buffer.nbytes for buffer in {id(buffer): buffer for buffer in self._buffers.values()}.values())

    def of(self, layer: LayerLayout) -> torch.Tensor:
        """The accumulator that a layer uses, fp32 [layer.numel]."""
        return self._buffers[layer.kind][: layer.numel]


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

    buffer: torch.Tensor
    holds: tuple[int, int] | None = None
    """(step, layer) of the gradient in it, until its copy to the host has been enqueued."""
    filled: Mark | None = None
    drained: Mark | None = None


class OutgoingGradients:
    """Buffers of finished gradients on their way to the host. `fill` and `drain` may run in different threads.

    Layers use the buffers in turn, from the head down. The caller must have seen the `drain` of a buffer's last
    gradient return before it fills it again; the device waits for the end of that copy.
    """

    def __init__(self, layout: ModelLayout, count: int, dtype: torch.dtype, streams: Streams) -> None:
        """Allocate `count` buffers of the arena's gradient type, each as large as the layers that use it."""
        self._streams = streams
        self._last = len(layout.layers) - 1
        numel = [0] * count
        for layer in layout.layers:
            index = self._index(layer.index, count)
            numel[index] = max(numel[index], layer.numel)
        self._buffers = [_Outgoing(torch.empty(size, dtype=dtype, device=streams.device)) for size in numel]

    def _index(self, layer: int, count: int) -> int:
        return (self._last - layer) % count

    def _of(self, layer: int) -> _Outgoing:
        return self._buffers[self._index(layer, len(self._buffers))]

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(outgoing.buffer.nbytes for outgoing in self._buffers)

    def fill(self, step: int, layer: int, accumulator: torch.Tensor) -> None:
        """Enqueue on the compute stream: convert a finished gradient into the layer's buffer, zero the accumulator.

        Args:
            step: Number of the step.
            layer: Whose gradient it is.
            accumulator: Its fp32 sums, [layer.numel].
        """
        outgoing = self._of(layer)
        assert outgoing.holds is None, f"gradient of step, layer {outgoing.holds} would be overwritten by {step, layer}"
        if outgoing.drained is not None:
            self._streams.compute.wait(outgoing.drained)
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
        assert outgoing.holds == (step, layer) and outgoing.filled is not None, f"no gradient of {step, layer} is ready"
        stream = self._streams.to_host
        with stream.enqueue():
            stream.wait(outgoing.filled)
            with spans.span(f"offload[{layer}]", Lane.D2H, stream, destination.nbytes):
                destination.copy_(outgoing.buffer[: destination.numel()], non_blocking=True)
            landed = outgoing.drained = stream.mark()
        outgoing.holds = None
        return landed

    def discard(self, step: int, layer: int) -> None:
        """Give a filled buffer back without copying it: for measurements of computation alone."""
        outgoing = self._of(layer)
        assert outgoing.holds == (step, layer), f"no gradient of {step, layer} is ready"
        outgoing.holds = None
