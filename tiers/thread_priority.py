"""Threads whose work nobody waits for: checkpoints are written in the time that a step leaves over."""

from __future__ import annotations

import os
import threading

LEAST_NICE = 19
"""Ray runs workers at 15: beside them a thread at 19 gets 2 of 7 parts of a core that both want, all of an idle one."""


def yield_to_others() -> None:
    """Put the calling thread, not its process, behind all others of the machine. For good: no thread gets it back.

    A process's main thread, which does other things too, stays as it is.
    """
    if threading.current_thread() is threading.main_thread():
        return
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_NICE)
