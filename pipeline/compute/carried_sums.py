"""Gradient sums on their way between the waves of a step: accumulators leave for host memory and come back.

A step in waves passes every layer several times. The fp32 sum of a layer's gradient waits in the arena in between and
goes on where it stopped, so that it is the sum that one wave makes, in the same order and in every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.compute.gradient_buffers import Accumulators
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import Mark, Streams
from pipeline.messages import Lane
from tiers.layout import LayerLayout


@dataclass
class _Turn:
    """What the device has still to do with an accumulator."""

    summed: Mark | None = None
    """When the compute stream was done with it."""
    stored: Mark | None = None
    """When its sum had left; it is not zero then."""
    fetched: Mark | None = None
    """When the sum of the waves before was in it."""


class CarriedSums:
    """Used in three threads, whose calls for one accumulator the edges of the graph put in order."""

    def __init__(self, accumulators: Accumulators, on_host: Mapping[int, torch.Tensor], streams: Streams) -> None:
        """Start with nothing carried.

        Args:
            accumulators: Of this process.
            on_host: By layer: its fp32 sum in the arena, flat [numel], pinned; owned by the tier.
            streams: Of this process.
        """
        self._accumulators = accumulators
        self._on_host = on_host
        self._streams = streams
        self._turns: dict[int, _Turn] = {}
        self._landed: dict[int, Mark] = {}
        """By layer: when its sum was in the arena."""

    def open(self, layout: LayerLayout) -> None:
        """Enqueue on the compute stream, before a layer's gradient is added to: its sum so far is there."""
        turn = self._turn(layout)
        if turn.fetched is not None:
            self._streams.compute.wait(turn.fetched)
        elif turn.stored is not None:
            self._streams.compute.wait(turn.stored)
            self._accumulators.of(layout).zero_()
        turn.fetched = turn.stored = None

    def close(self, layout: LayerLayout) -> None:
        """After the last work of a wave that was enqueued on a layer's accumulator."""
        self._turn(layout).summed = self._streams.compute.mark()

    def store(self, layout: LayerLayout, spans: SpanRecorder) -> None:
        """Enqueue the way of a layer's sum to the arena."""
        turn, stream, target = self._turn(layout), self._streams.to_host, self._on_host[layout.index]
        assert turn.summed is not None, f"layer {layout.index} has no sum"
        stream.wait(turn.summed)
        with stream.enqueue(), spans.span(f"store_sum[{layout.index}]", Lane.D2H, stream, target.nbytes):
            target.copy_(self._accumulators.of(layout), non_blocking=True)
        turn.stored = self._landed[layout.index] = stream.mark()

    def fetch(self, layout: LayerLayout, spans: SpanRecorder) -> None:
        """Enqueue the way of a layer's sum back to its accumulator, behind all that still uses either."""
        turn, stream, source = self._turn(layout), self._streams.to_device, self._on_host[layout.index]
        for mark in (self._landed[layout.index], turn.summed, turn.stored):
            if mark is not None:
                stream.wait(mark)
        with stream.enqueue(), spans.span(f"fetch_sum[{layout.index}]", Lane.H2D, stream, source.nbytes):
            self._accumulators.of(layout).copy_(source, non_blocking=True)
        turn.stored, turn.fetched = None, stream.mark()

    def _turn(self, layout: LayerLayout) -> _Turn:
        return self._turns.setdefault(self._accumulators.number(layout), _Turn())
