"""Append-only files of one JSON object a line, each with the step it belongs to, that survive a kill and a resume."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiers.durable_files import FILE_MODE, make_directory, naming, replace_file
from tiers.parsing import parse_json


class JsonLines:
    """Appends rows, each visible to readers once written. A context manager.

    A resumed run computes the steps after its checkpoint again: their rows, and a last line that a kill cut short, are
    dropped when the file is opened; what stays is published atomically.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open `path` for the run that goes on after `resumed_step`; 0 starts anew.

        Raises:
            OSError: The file cannot be written.
        """
        make_directory(path.parent)
        if path.exists():
            _drop_rows_after(path, resumed_step)
        # Unbuffered: a row is handed to the kernel whole, so that readers and a kill never meet half of one, and what a
        # full disk refuses does not wait for the next one.
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._path = path
        self._num_bytes = path.stat().st_size

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._num_bytes

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows; each has a `step`. JSON has no NaN or infinity: they must be gone, see `finite`.

        Raises:
            OSError: The disk is full or refuses, naming the file.
        """
        for row in rows:
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            self._write(line)
            self._num_bytes += len(line)

    def sync(self) -> None:
        """Make the rows so far outlive a crash of the machine. Raises like `append`."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises like `append`: some filesystems refuse only now."""
        with naming(self._path):
            self._file.close()

    def _write(self, line: bytes) -> None:
        with naming(self._path):
            written = self._file.write(line)
        if written != len(line):  # the next start drops the half row
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null for NaN and infinity, and `non_finite` naming those fields: never a number that was not got."""
    bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**row, **dict.fromkeys(bad), "non_finite": bad}


def has_row(path: Path, step: int) -> bool:
    """Whether a file, which may be missing, has a row of `step`."""
    return path.exists() and any(_step_of(line) == step for line in path.read_bytes().splitlines(keepends=True))


def _drop_rows_after(path: Path, step: int) -> None:
    """Keep the rows up to `step`."""
    with naming(path):
        content = path.read_bytes()
    kept = [line for line in content.splitlines(keepends=True) if _step_of(line) <= step]
    if len(joined := b"".join(kept)) != len(content):
        replace_file(path, joined)


def _step_of(line: bytes) -> float:
    """The step of a row; infinity for a line that is none."""
    try:
        return int(parse_json(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf
