"""Ends a command at SIGINT (Ctrl+C), SIGTERM or SIGHUP (a closed terminal) without a traceback, whenever it comes.

`tasks/__init__` calls it before a command's own imports, which take seconds: what Python does by default in them is a
traceback through the libraries. A run that has begun replaces these handlers by those of `tasks.stop_signals`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

IGNORED = frozenset(number for number in _NUMBERS if signal.getsignal(number) is signal.SIG_IGN)
"""Those that came ignored, as `nohup` and shells set them for what must go on: they stay so."""
HEEDED = tuple(number for number in _NUMBERS if number not in IGNORED)

_asked = False


def end_at_signals() -> None:
    """Let a signal end the process with status 128 + signal, giving back first what `main` holds."""
    for number in HEEDED:
        signal.signal(number, _end)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def whoever_handles_signals() -> Iterator[None]:
    """End the process at a signal that comes inside, although a library puts a handler of its own there, as Ray does.

    A closed terminal's is held back until the end, and never reaches the processes that are started inside: they would
    die of it before a run has saved.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # Python writes there whoever the handler is
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    came: list[int] = []
    try:
        yield
    finally:
        try:
            end_at_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        finally:
            signal.set_wakeup_fd(woken)
            with suppress(BlockingIOError):
                came = [number for number in os.read(reader, 4096) if number in HEEDED]
            os.close(reader)
            os.close(writer)
        if came:
            _leave(came[0])


def told(number: int) -> None:
    """Say which signal ended the command."""
    # Not through sys.stderr: the signal may have come in the middle of a write to it, and Python refuses a second.
    with suppress(OSError):
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())


def _end(number: int, frame: FrameType | None) -> None:
    # Libraries swallow exceptions while they are imported; nothing is held then. `main` may call such code too.
    if _asked or not _in_main(frame):
        told(number)
        os._exit(128 + number)
    _leave(number)


def _leave(number: int) -> None:
    global _asked
    if not _asked:
        told(number)
    _asked = True
    raise SystemExit(128 + number)


def _in_main(frame: FrameType | None) -> bool:
    """Whether the command's `main` is at work."""
    while frame is not None:
        if frame.f_code.co_name == "main" and frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False
