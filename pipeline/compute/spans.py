"""When each device operation really ran: pairs of marks, turned into spans of `time.monotonic()` afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext

from pipeline.compute.streams import Mark, Stream
from pipeline.messages import Lane, LaneSpan


class SpanRecorder:
    """Collects the spans of one actor. Safe to use from several threads."""

    def __init__(self, actor: str, enabled: bool) -> None:
        self._actor = actor
        self._enabled = enabled
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Lane, Mark, Mark, int]] = []

    def span(self, name: str, lane: Lane, stream: Stream, num_bytes: int = 0) -> Context[None]:
        """Record what is enqueued on `stream` inside as one operation. Waits for other streams belong before it."""
        return self._record(name, lane, stream, num_bytes) if self._enabled else nullcontext()

    @contextmanager
    def _record(self, name: str, lane: Lane, stream: Stream, num_bytes: int) -> Iterator[None]:
        start = stream.mark()
        yield
        with self._lock:
            self._pending.append((name, lane, start, stream.mark(), num_bytes))

    def take(self) -> tuple[LaneSpan, ...]:
        """Return the spans that have ended and forget them; the others come with a later call."""
        with self._lock:
            pending, self._pending = self._pending, []
        taken: list[LaneSpan] = []
        unfinished: list[tuple[str, Lane, Mark, Mark, int]] = []
        for record in pending:
            name, lane, start, end, num_bytes = record
            end_s = end.time_s()
            start_s = start.time_s() if end_s is not None else None
            if start_s is None or end_s is None:
                unfinished.append(record)
            else:
                taken.append(LaneSpan(name, lane, self._actor, start_s, end_s, num_bytes))
        with self._lock:
            self._pending = unfinished + self._pending
        return tuple(taken)
