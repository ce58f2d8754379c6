"""The compute stream as the passes use it: one operation at a time, on weights that lie in their slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import Streams
from pipeline.errors import DeviceMemoryError
from pipeline.messages import Lane


class DeviceWork:
    """Enqueues operations of the compute lane."""

    def __init__(self, streams: Streams, slots: WeightSlots, spans: SpanRecorder, kept_layers: int) -> None:
        """Keep what every operation needs.

        Args:
            streams: Of this process.
            slots: Where layers lie.
            spans: Receives the time of every operation.
            kept_layers: As the run was told, for the message when memory ends.
        """
        self._streams = streams
        self._slots = slots
        self._spans = spans
        self._kept_layers = kept_layers

    @contextmanager
    def reading(self, name: str, *reads: tuple[int, int]) -> Iterator[list[torch.Tensor]]:
        """Enqueue one operation, which reads staged layers, given as (layer, slot): none, one or two.

        Yields:
            Their flat weights.

        Raises:
            DeviceMemoryError: The device has no room for what the operation makes.
        """
        compute = self._streams.compute
        try:
            with compute.enqueue():
                first = self._slots.reading(*reads[0]) if reads else nullcontext()
                second = self._slots.reading(*reads[1]) if len(reads) > 1 else nullcontext()
                with first as one, second as two, self._spans.span(name, Lane.COMPUTE, compute):
                    yield [weights for weights in (one, two) if weights is not None]
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{name} found no device memory ({str(error).splitlines()[0]}); lower memory.kept_layers "
                f"(now {self._kept_layers}), train.micro_batch or train.sequence_length, or memory.gpu_gib, "
                "so that activations wait in RAM"
            ) from error
