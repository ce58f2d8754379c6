"""Streams and marks of the device, and their twin on a machine without one: the same code runs on both.

On CUDA work is enqueued on a few streams that run side by side; a *mark* is a point in a stream's order that another
stream, or the host, can wait for. On the CPU work is done when its call returns, so waiting is void and a mark is only
a time. Streams are made once a process: the caching allocator keeps a
pool for each stream ever used, so a new stream each step would grow memory without end.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a stream's order of work."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached the mark."""

    def time_s(self) -> float | None:
        """`time.monotonic()` at which the mark was reached; None while it is not."""


class Stream(Protocol):
    """Work that the device does in order."""

    def enqueue(self) -> AbstractContextManager[object]:
        """Device work that this thread starts inside goes to this stream."""

    def mark(self) -> Mark:
        """Mark the end of what has been enqueued so far."""

    def wait(self, mark: Mark) -> None:
        """Let later work of this stream start only after `mark`. Does not block the host."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of another stream from reuse until what is enqueued here is done."""


@dataclass(frozen=True)
class Streams:
    """The streams of a process."""

    device: torch.device
    compute: Stream
    to_device: Stream
    to_host: Stream
    prepare: Stream
    """Makes ready the next step's ids and masks, where the host may wait without waiting for the layers at work."""

    def synchronize(self) -> None:
        """Block until everything enqueued is done."""
        for stream in (self.compute, self.to_device, self.to_host, self.prepare):
            stream.mark().synchronize()


def open_streams(device: torch.device) -> Streams:
    """Make the streams of a process on `device`; call once."""
    if device.type == "cuda":
        clock = _CudaClock(device)
        return Streams(device, *(_CudaStream(device, clock) for _ in range(4)))
    host = _HostStream()
    return Streams(device, host, host, host, host)


@dataclass(frozen=True, slots=True)
class _HostMark:
    at_s: float

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def time_s(self) -> float:
        return self.at_s


class _HostStream:
    """Work is done when its call returns."""

    def enqueue(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> _HostMark:
        return _HostMark(time.monotonic())

    def wait(self, mark: Mark) -> None:
        """What came before is done already."""

    def hold(self, tensor: torch.Tensor) -> None:
        """What reads the tensor is done already."""


class _CudaClock:
    """Translates event times to `time.monotonic()` through an event whose host time is known.

    Event distances are fp32 milliseconds: an anchor hours old would blur them to a millisecond and more, so the anchor
    is renewed. Its stream is always idle, so the event is reached as soon as it is recorded.
    """

    renew_s = 30.0
    """fp32 keeps 30,000 ms to 2 microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._anchor = self._make_anchor()

    def _make_anchor(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        event.synchronize()
        return event, time.monotonic()

    def time_s(self, event: torch.cuda.Event) -> float:
        anchor, anchor_s = self._anchor
        if time.monotonic() - anchor_s > self.renew_s:
            anchor, anchor_s = self._anchor = self._make_anchor()
        return anchor_s + float(anchor.elapsed_time(event)) / 1e3


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, clock: _CudaClock) -> None:
        self.event = event
        self._clock = clock

    def synchronize(self) -> None:
        self.event.synchronize()

    def time_s(self) -> float | None:
        return self._clock.time_s(self.event) if self.event.query() else None


class _CudaStream:
    def __init__(self, device: torch.device, clock: _CudaClock) -> None:
        self._stream = torch.cuda.Stream(device)
        self._clock = clock

    def enqueue(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> _CudaMark:
        # A thread that waits must sleep, not spin: the optimizers need the cores.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return _CudaMark(event, self._clock)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._stream.wait_event(mark.event)

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)
