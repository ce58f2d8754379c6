"""What kept the disks busy and when, recorded by the threads that did it, taken by the driver."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MAX_SPANS = 100_000
"""Some steps of a model of hundreds of layers; older ones go when nobody takes them."""


class IoSpan(NamedTuple):
    """One operation that kept the disk busy. Times are `time.monotonic()`."""

    name: str
    """As in the step's graph, e.g. `load_state[17]`."""
    lane: str
    """`nvme_read` or `nvme_write`."""
    start_s: float
    end_s: float
    num_bytes: int


class IoSpans:
    """Those that ended and were not taken yet. Thread-safe: a deque takes and gives whole entries."""

    def __init__(self) -> None:
        self._ended: deque[IoSpan] = deque(maxlen=MAX_SPANS)

    @contextmanager
    def during(self, name: str, lane: str, num_bytes: int) -> Iterator[None]:
        """Around an operation; one that raises leaves no span."""
        start_s = time.monotonic()
        yield
        self._ended.append(IoSpan(name, lane, start_s, time.monotonic(), num_bytes))

    def take(self) -> tuple[IoSpan, ...]:
        """Return and forget them, in the order in which they ended."""
        spans = []
        while self._ended:
            spans.append(self._ended.popleft())
        return tuple(spans)
