"""Standard output and standard error that cannot fail a command: what they do not take is dropped.

A reader that ends (`| head`, a `tee` that is killed), a terminal that is gone or a full disk would otherwise raise in
whatever prints next, and end a training run with hours of work in memory. `CommandParser` installs this for every
command.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHARACTERS = "megatrain-console"


def install() -> None:
    """Put `sys.stdout` and `sys.stderr` on streams that never raise; once done, or where they are no files, a no-op."""
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def lost() -> OSError | None:
    """Why standard output did not take all that was written; None where it did, or its reader wanted no more."""
    sys.stdout.flush()
    output = _output(sys.stdout)
    return None if output is None or isinstance(output.error, BrokenPipeError) else output.error


class _Output(io.RawIOBase):
    """A descriptor that takes everything: its first error is kept, not raised. It stays open when this is closed."""

    def __init__(self, descriptor: int, replaced: TextIO) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._replaced = replaced  # it would close the descriptor where nothing else holds it

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: ReadableBuffer, /) -> int:
        whole = left = memoryview(content).cast("B")
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # another process made the pipe or terminal non-blocking
                    select.select([], [self._descriptor], [])
        except OSError as error:
            # The next write is tried again: a full disk may have room then.
            self.error = self.error or error
        return len(whole)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:
        return _stand_in(descriptor)
    if not isinstance(stream, io.TextIOWrapper) or _output(stream) is not None:
        return stream
    try:
        raw = _Output(stream.fileno(), stream)
    except (OSError, ValueError):  # it is in memory, or closed
        return stream
    try:
        stream.flush()
    except OSError as error:
        raw.error = error
    buffer = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        cast("BinaryIO", buffer),
        encoding=stream.encoding,
        errors=_CHARACTERS if stream.errors in {"strict", "surrogateescape"} else stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _stand_in(descriptor: int) -> TextIO:
    """For a stream that was closed when Python started (`>&-`).

    Its descriptor is taken too: a file that is opened later would get its number, and what libraries print there.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null, descriptor)
    os.set_inheritable(null, null == descriptor)
    return os.fdopen(null, "w", encoding="utf-8", errors="backslashreplace")


def _output(stream: TextIO) -> _Output | None:
    """What `install` put below a stream."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Output) else None


def _as_far_as_possible(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of file names that are not UTF-8 as they are, and other characters that the encoding lacks escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_CHARACTERS, _as_far_as_possible)
