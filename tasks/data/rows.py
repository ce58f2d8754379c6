"""What readers hand on: rows of text or blocks of token ids, and the policy for rows that cannot be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tasks.data.settings import DataError, OnBadRow
from tasks.data.sources import SourceFile

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TextRow:
    """A document's text, or a part of it when it is too large to hold at once."""

    file: int
    """Index in the list of source files."""
    row: int
    text: bytes
    """Raw bytes of the file, or UTF-8."""
    starts_document: bool = True
    ends_document: bool = True


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Token ids of consecutive rows, flat. Row i owns `ids[offsets[i]:offsets[i + 1]]`."""

    file: Int64Array
    """[rows] index of the source file."""
    row: Int64Array
    """[rows] row in the file."""
    offsets: Int64Array
    """[rows + 1]"""
    ids: Int64Array
    """[offsets[-1]], not checked yet."""
    ends: BoolArray
    """[rows] False where the document goes on in the next row or block (large texts only, never with labels)."""
    labels: Int64Array | None = None
    """As `ids`, unshifted. Meaningless where not labelled."""
    labelled: BoolArray | None = None
    """[rows], given with labels: False where the row has none of its own."""

    def locate(self, index: int) -> tuple[int, int, int]:
        """Give the (file, row, position in the row) of `ids[index]`."""
        at = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return int(self.file[at]), int(self.row[at]), index - int(self.offsets[at])


def describe_row(files: tuple[SourceFile, ...], file: int, row: int, position: int | None = None) -> str:
    """Name a place as file:row:position. Rows of text and JSONL are lines from 1; all else counts from 0."""
    tail = "" if position is None else f":{position}"
    return f"{files[file].path}:{row}{tail}"


@dataclass(slots=True)
class RowTally:
    """Counts rows, and applies the policy to those that cannot be used."""

    on_bad_row: OnBadRow
    rows: int = 0
    """Rows read, good and bad."""
    rows_without_labels: int = 0
    """Rows of token ids that carry no labels of their own."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows."""

    def bad(self, reason: str, place: str, detail: str = "") -> None:
        """Refuse the data, or count the row as left out.

        Args:
            reason: a short phrase, the same for all rows of a kind.
            place: file:row, file:row:position.
            detail: what was found.
        """
        if self.on_bad_row == "error":
            found = f" ({detail})" if detail else ""
            raise DataError(
                f'{place}: {reason}{found}; correct the row, or leave such rows out: data.on_bad_row = "skip"'
            )
        self.dropped[reason] += 1

    def drop(self, reason: str) -> None:
        """Count a row that is left out in any case."""
        self.dropped[reason] += 1
