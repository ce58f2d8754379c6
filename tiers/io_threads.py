"""Threads that carry out the steps of several callers, none of which may leave while a step of its own still runs.

A step uses a descriptor and memory of its caller. Were these given up too soon, it would write into whatever file gets
the descriptor's number next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager

from tiers.errors import ShardError


class IoThreads:
    """A pool of threads. Thread-safe; belongs to the process that made it (threads do not survive a fork)."""

    def __init__(self, threads: int) -> None:
        """Start the threads as there is work; at most so many."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="direct-io")
        self._process = os.getpid()
        self._callers = _Gate(lambda: ShardError("the I/O threads have ended: nothing is read or written after that"))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around all that a caller does with the threads: its descriptors are opened and closed within.

        Raises:
            ShardError: The threads have ended, or are another process's.
        """
        if os.getpid() != self._process:
            raise ShardError(
                f"the I/O threads of process {self._process} do not exist in its fork {os.getpid()}; "
                "open a DirectIO there"
            )
        with self._callers.entered():
            yield

    def run(self, work: Iterable[Iterable[Callable[[], int]]]) -> list[tuple[int, ...]]:
        """Carry out all steps, several at once, and return what they return. Only while they are `in_use`.

        However it ends, no step runs any more and none will.

        Raises:
            ShardError: The system gives no thread; or what a step raises.
        """
        steps = _Gate(CancelledError)

        def carry_out(step: Callable[[], int]) -> int:
            with steps.entered():
                return step()

        try:
            rows = [[self._pool.submit(carry_out, step) for step in row] for row in work]
            wait([future for row in rows for future in row])
        except RuntimeError as error:
            raise ShardError(
                f"cannot start a thread for I/O: {error}; raise the limit of processes (ulimit -u, or the container's) "
                "or lower memory.prefetch_threads"
            ) from error
        finally:
            # `submit` may raise after it has queued a step, which no future tells of.
            steps.close()
        return [tuple(future.result() for future in row) for row in rows]

    def close(self) -> None:
        """Wait until nobody uses the threads, and end them. May be called twice; does nothing in a fork."""
        if os.getpid() != self._process:
            return
        self._callers.close()
        self._pool.shutdown(wait=True)


class _Gate:
    """Lets in whoever comes until it is closed, which waits for those who are inside."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        """Open it; `refusal` makes what later comers get."""
        self._refusal = refusal
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise self._refusal()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
