"""Watches over the driver's waits and speaks up when one takes too long: a run never hangs in silence."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pipeline.watchdog import Patience
from tiers.quantities import shown_duration

logger = logging.getLogger(__name__)


class Vigil:
    """A thread that reports waits which exceed what `patience` grants. A context manager that ends it.

    A report is a warning in the log; it is repeated each time the wait has doubled. The wait itself is not ended: what
    is slow may still arrive, and whoever watches the run can tell better.
    """

    def __init__(self, report: Callable[[], str], patience: Patience | None = None) -> None:
        """Args: `report` says where every actor is, from any thread; `patience` is learned from and asked."""
        self._report = report
        self._patience = patience or Patience()
        self._condition = threading.Condition()
        self._kind: str | None = None
        self._started_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="vigil", daemon=True)

    @contextmanager
    def over(self, kind: str) -> Iterator[None]:
        """Watch what the caller does inside: a wait of this kind. Waits do not nest."""
        with self._condition:
            self._kind, self._started_s = kind, time.monotonic()
            self._condition.notify()
        try:
            yield
            self._patience.took(kind, time.monotonic() - self._started_s)
        finally:
            with self._condition:
                self._kind = None
                self._condition.notify()

    def __enter__(self) -> Vigil:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _watch(self) -> None:
        seen, doublings = None, 0
        while True:
            with self._condition:
                if self._closed:
                    return
                kind, started_s = self._kind, self._started_s
                if kind is None:
                    self._condition.wait()
                    continue
                if (kind, started_s) != seen:
                    seen, doublings = (kind, started_s), 0
                left_s = started_s + self._patience.limit_s(kind) * 2**doublings - time.monotonic()
                if left_s > 0:
                    self._condition.wait(left_s)
                    continue
                doublings += 1
            # Not under the lock: should Ray not answer either, the run must not wait for the report.
            self._speak(kind, time.monotonic() - started_s)

    def _speak(self, kind: str, waited_s: float) -> None:
        usual_s = self._patience.usual_s(kind)
        usual = "it is the first" if usual_s is None else f"usual: {shown_duration(usual_s)}"
        try:
            where = self._report()
        except Exception as error:
            # Ray may be what is broken; the next waits must be watched all the same.
            where = f"Where the actors are cannot be told: {error!r}"
        logger.warning("waiting for the %s since %s (%s). %s", kind, shown_duration(waited_s), usual, where)
