"""Append-only files of one JSON object a line, each with the step it belongs to, that survive a kill and a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiers.durable_files import make_directory, replace_file


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
        self.last_step = _drop_rows_after(path, resumed_step) if path.exists() else None
        """Of the last row; None where there is none."""
        # Line buffering: a row is handed to the kernel whole, so that readers and a kill never meet half of one.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._num_bytes = path.stat().st_size

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._num_bytes

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows; each has a `step`. JSON has no NaN or infinity: they must be gone, see `finite`."""
        for row in rows:
            line = json.dumps(row, allow_nan=False) + "\n"
            self._file.write(line)
            self.last_step = row["step"]
            self._num_bytes += len(line)  # json.dumps writes ASCII

    def close(self) -> None:
        """Close the file."""
        self._file.close()

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


def _drop_rows_after(path: Path, step: int) -> int | None:
    """Keep the rows up to `step`; return the step of the last one."""
    content = path.read_bytes()
    kept = [line for line in content.splitlines(keepends=True) if _step_of(line) <= step]
    if len(joined := b"".join(kept)) != len(content):
        replace_file(path, joined)
    return int(_step_of(kept[-1])) if kept else None


def _step_of(line: bytes) -> float:
    """The step of a row; infinity for a line that is none."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
