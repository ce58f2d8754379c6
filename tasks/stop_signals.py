"""SIGTERM and SIGINT ask a run to stop: it finishes the steps at work and saves. A second signal ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
"""Exit status after a second signal, as shells report a process ended by SIGINT."""


class StopSignals:
    """Handles the signals while entered; enter it after `ray.init`, which sets a handler of its own."""

    def __init__(self) -> None:
        self._requested = False
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether the run should stop."""
        return self._requested

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Once the run has been saved and is ending, one signal more must not cut short the end of Ray's processes.
            signal.signal(number, signal.SIG_IGN if self._requested else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            os._exit(INTERRUPTED)
        self._requested = True
        name = signal.Signals(number).name
        # Not through sys.stdout: the signal may have come in the middle of a write to it, and Python refuses a second.
        with contextlib.suppress(OSError):
            os.write(1, f"{name}: finishing the step and saving; a second signal ends the run at once\n".encode())
