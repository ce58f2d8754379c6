"""Ends a command at SIGINT (Ctrl+C) or SIGTERM without a traceback, at whatever moment the signal comes.

`tasks/__init__` calls it before a command's own imports, which take seconds: what Python does by default in them is a
traceback through the libraries. A run that has begun replaces these handlers by those of `tasks.stop_signals`.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

_asked = False


def end_at_signals() -> None:
    """Let either signal end the process with status 128 + signal, giving back first what `main` holds."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and shells set it for what must go on
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    global _asked
    # Not through sys.stderr: the signal may have come in the middle of a write to it, and Python refuses a second.
    with suppress(OSError):
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    # Libraries swallow exceptions while they are imported; nothing is held then. `main` may call such code too.
    if _asked or not _in_main(frame):
        os._exit(128 + number)
    _asked = True
    raise SystemExit(128 + number)


def _in_main(frame: FrameType | None) -> bool:
    """Whether the command's `main` is at work."""
    while frame is not None:
        if frame.f_code.co_name == "main" and frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False
