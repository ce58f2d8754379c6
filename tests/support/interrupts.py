"""Sends a process a signal at an exact point of its own: when it is about to import a module or to open a file.

`install` runs inside the process, see `inside/sitecustomize.py`; the variable is `SIGNAL EVENT NAME`, for instance
`SIGINT import torch`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

INTERRUPT = "MEGATRAIN_INTERRUPT"


def install() -> None:
    """Make this process interrupt itself, once."""
    name, wanted, what = os.environ[INTERRUPT].split(" ", 2)
    waiting = True

    def interrupt(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal waiting
        if waiting and event == wanted and str(arguments[0]) == what:
            waiting = False
            signal.raise_signal(signal.Signals[name])

    sys.addaudithook(interrupt)
