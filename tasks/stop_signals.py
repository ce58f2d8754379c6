"""Signals that stop a run: before it has begun it ends at once, then it finishes the steps at work and saves.

SIGTERM, SIGINT, and SIGHUP of a closed terminal; those that were ignored when the command was started stay so. A second
one ends the run at once, whatever it is at.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType

from tasks.interruption import HEEDED, told

INTERRUPTED = 130
"""Exit status after a second signal, as shells report a process ended by SIGINT."""


class StopSignals:
    """Handles the signals from entry on; enter it after `ray.init`, which sets a handler of its own."""

    def __init__(self) -> None:
        self._number = 0
        """Of the signal that came."""
        self._finishing = False

    def requested(self) -> bool:
        """Whether the run should stop."""
        return self._number != 0

    def status(self) -> int:
        """Exit status of a run that a signal ended before it had anything to save."""
        return 128 + self._number

    def end_at_once(self) -> None:
        """Let a signal raise KeyboardInterrupt in the main thread: there is nothing new to save.

        Raises:
            KeyboardInterrupt: It came already.
        """
        self._finishing = False
        self._raise_if_requested()

    def finish_and_save(self) -> None:
        """Let a signal only ask for the end from now on.

        Raises:
            KeyboardInterrupt: It came before.
        """
        # Not what was raised in the handler: whoever was at work then may have swallowed it.
        self._raise_if_requested()
        self._finishing = True

    def ignore(self) -> None:
        """The run's ending is known: no signal changes it any more, nor cuts short the end of Ray's processes."""
        for number in HEEDED:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> StopSignals:
        for number in HEEDED:
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ignore()

    def _raise_if_requested(self) -> None:
        if self.requested():
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested():
            os._exit(INTERRUPTED)
        self._number = number
        if not self._finishing:
            told(number)
            # No other exception comes out of a wait in Ray as what it is.
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        # Not through sys.stdout: the signal may have come in the middle of a write to it, and Python refuses a second.
        with contextlib.suppress(OSError):
            os.write(1, f"{name}: finishing the step and saving; a second signal ends the run at once\n".encode())
