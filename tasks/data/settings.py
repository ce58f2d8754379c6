"""What a user may say about training data, checked once; `open_dataset` and everything below it trust it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

DataFormat = Literal["auto", "text", "jsonl", "parquet", "arrow"]
OnBadRow = Literal["error", "skip"]
LongDocuments = Literal["split", "truncate", "drop"]

BYTES_TOKENIZER = "bytes"
DEFAULT_LABELS_COLUMN = "labels"


class DataError(ValueError):
    """The user's data cannot be trained on as it is; the message names the file, the row and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where documents come from and how they become sequences.

    Raises:
        DataError: a value is out of its range.
    """

    paths: tuple[Path, ...]
    """Files, directories (searched recursively) or globs. Files are taken in sorted order within each path."""
    left_out: tuple[Path, ...] = ()
    """Directories that hold no data although they may lie inside those of `paths`: the run's own."""
    format: DataFormat = "auto"
    """`auto` goes by each file's extension; unknown extensions are plain text."""
    text_field: str = "text"
    """Field of JSONL, Parquet and Arrow rows that holds a document's text."""
    tokenizer: str = BYTES_TOKENIZER
    """`bytes` (every byte is a token, end of document is 256) or a directory of a Hugging Face tokenizer."""
    append_eos: bool = True
    """End every tokenised document with the end-of-document token. Rows of token ids stay as they are."""
    input_ids_column: str = "input_ids"
    """Column of token ids. A row that has it is a document already tokenised."""
    labels_column: str | None = DEFAULT_LABELS_COLUMN
    """Column of labels, unshifted as in Hugging Face: labels[i] belongs to input_ids[i], and only -100 is ignored.

    Rows without labels, or with null labels, are supervised in every token but the first. None ignores the column.
    """
    on_bad_row: OnBadRow = "error"
    """For rows that cannot be read (null, empty, malformed): refuse the data, or leave the row out and count it."""
    long_documents: LongDocuments = "split"
    """A document longer than a sequence: cut into pieces that keep every token, cut off, or left out."""
    shuffle: bool = True
    """Permute the sequences, differently in each epoch, by the run's seed. False keeps the order of the files."""
    eval_fraction: float = 0.0
    """Part of the documents held out, chosen by content and seed, so that equal documents stay on one side."""
    suffixes: tuple[str, ...] = ()
    """Patterns of file names to take from directories, e.g. `*.py`. Empty: the extensions of the format."""
    key: str = "data.path"
    """The recipe's key that `paths` came from, for messages."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise DataError(f"{self.key} names nothing: give a file, a directory or a glob")
        _check_choice("format", self.format, get_args(DataFormat))
        _check_choice("on_bad_row", self.on_bad_row, get_args(OnBadRow))
        _check_choice("long_documents", self.long_documents, get_args(LongDocuments))
        if not 0.0 <= self.eval_fraction < 1.0:
            raise DataError(f"data.eval_fraction is {self.eval_fraction}; it must lie in [0, 1)")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DataError(f"data.{name} is {value!r}; it must be one of {', '.join(choices)}")
