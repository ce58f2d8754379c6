"""Reads Parquet and Arrow IPC files: a row is a document, of token ids or of text.

Files are read in record batches that are never combined: 32-bit list offsets overflow beyond 2^31 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.data.rows import BoolArray, Int64Array, RowTally, TextRow, TokenBlock, describe_row
from tasks.data.settings import DEFAULT_LABELS_COLUMN, DataError, DataSettings
from tasks.data.sources import SourceFile

BATCH_ROWS = 1024
"""Rows at once: 64 MB of int64 ids at 8,192 tokens a row."""


def read_columnar_file(
    files: tuple[SourceFile, ...],
    file: int,
    settings: DataSettings,
    tally: RowTally,
    *,
    needs_utf8: bool,
    advance: Callable[[float], None],
) -> Iterator[TextRow | TokenBlock]:
    """Yield blocks of token ids if the file has such a column, else its rows of text.

    Raises:
        DataError: the file is damaged, lacks the columns, or they are of another type.
    """
    path = files[file].path
    try:
        with _open_batches(files[file]) as (schema, num_rows, batches):
            columns = _Columns.choose(schema, settings, str(path))
            first = 0
            for batch in batches(columns.names):
                for at in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(at, BATCH_ROWS)
                    tally.rows += part.num_rows
                    advance(files[file].num_bytes * part.num_rows / max(num_rows or batch.num_rows, 1))
                    reader = _BatchReader(part, files, file, first, tally)
                    if columns.tokens:
                        block = reader.token_block(settings.input_ids_column, columns.labels)
                        if block is not None:
                            yield block
                    else:
                        yield from reader.text_rows(settings.text_field, needs_utf8=needs_utf8)
                    first += part.num_rows
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter for names of columns
        raise DataError(f"{path} cannot be read as {files[file].format}: {error}") from error


class _Columns:
    """Which columns of a file to read."""

    def __init__(self, names: list[str], *, tokens: bool, labels: str | None) -> None:
        self.names = names
        self.tokens = tokens
        self.labels = labels

    @staticmethod
    def choose(schema: Any, settings: DataSettings, path: str) -> _Columns:
        ids = settings.input_ids_column
        if ids in schema.names:
            _require_integer_lists(schema.field(ids).type, ids, path)
            labels = settings.labels_column if settings.labels_column in schema.names else None
            if labels is None and settings.labels_column not in (None, DEFAULT_LABELS_COLUMN):
                raise DataError(f"{path} has no column {settings.labels_column!r}; it has {', '.join(schema.names)}")
            if labels is not None:
                _require_integer_lists(schema.field(labels).type, labels, path)
            return _Columns([ids, labels] if labels else [ids], tokens=True, labels=labels)
        if settings.text_field in schema.names:
            _require_text(schema.field(settings.text_field).type, settings.text_field, path)
            return _Columns([settings.text_field], tokens=False, labels=None)
        raise DataError(
            f"{path} has neither a column {ids!r} of token ids nor a column {settings.text_field!r} of text; "
            f"it has {', '.join(schema.names)}. Set data.columns.input_ids or data.text_field"
        )


def _is_list(column_type: Any) -> bool:
    types = pa.types
    return bool(
        types.is_list(column_type)
        or types.is_large_list(column_type)
        or types.is_fixed_size_list(column_type)
        or types.is_list_view(column_type)
        or types.is_large_list_view(column_type)
    )


def _require_integer_lists(column_type: Any, column: str, path: str) -> None:
    if pa.types.is_null(column_type):
        return
    if not _is_list(column_type) or not (
        pa.types.is_integer(column_type.value_type) or pa.types.is_null(column_type.value_type)
    ):
        raise DataError(f"{path}: column {column!r} is of type {column_type}; it must be a list of integers")


def _require_text(column_type: Any, column: str, path: str) -> None:
    types = pa.types
    if not (
        types.is_null(column_type)
        or types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
        or types.is_binary(column_type)
        or types.is_large_binary(column_type)
    ):
        raise DataError(f"{path}: column {column!r} is of type {column_type}; it must be text")


@contextmanager
def _open_batches(source: SourceFile) -> Iterator[tuple[Any, int | None, Callable[[list[str]], Iterator[Any]]]]:
    """Open a file and give its schema, its number of rows where known, and its record batches."""
    if source.format == "parquet":
        with pq.ParquetFile(source.path) as parquet:
            num_rows = parquet.metadata.num_rows
            yield parquet.schema_arrow, num_rows, lambda names: parquet.iter_batches(BATCH_ROWS, columns=names)
        return
    with pa.memory_map(str(source.path)) if source.num_bytes else pa.OSFile(str(source.path)) as stream:
        try:
            reader = pa.ipc.open_file(stream)
            get_batch, num_batches = reader.get_batch, reader.num_record_batches
            batches: Iterator[Any] = (get_batch(index) for index in range(num_batches))
        except pa.ArrowInvalid:  # no file footer: the stream format, as Hugging Face datasets writes it
            stream.seek(0)
            reader = pa.ipc.open_stream(stream)
            batches = iter(reader)
        yield reader.schema, None, lambda names: (batch.select(names) for batch in batches)


class _BatchReader:
    """Turns one record batch into rows; row numbers count from the start of the file."""

    def __init__(self, batch: Any, files: tuple[SourceFile, ...], file: int, first_row: int, tally: RowTally) -> None:
        self._batch = batch
        self._files = files
        self._file = file
        self._first_row = first_row
        self._tally = tally

    def _bad(self, reason: str, row: int, detail: str = "", position: int | None = None) -> None:
        place = describe_row(self._files, self._file, self._first_row + row, position)
        self._tally.bad(reason, place, detail)

    def text_rows(self, column: str, *, needs_utf8: bool) -> Iterator[TextRow]:
        """Yield the rows of a text column."""
        array = self._batch.column(column)
        is_binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
        values = array.to_pylist() if is_binary or pa.types.is_null(array.type) else array.cast(pa.large_binary())
        for row, value in enumerate(values if isinstance(values, list) else values.to_pylist()):
            if value is None:
                self._bad("no text", row, f"{column} is null")
            elif not value:
                self._bad("empty text", row)
            elif is_binary and needs_utf8 and not _is_utf8(value):
                self._bad("not UTF-8", row)
            else:
                yield TextRow(self._file, self._first_row + row, value)

    def token_block(self, ids_column: str, labels_column: str | None) -> TokenBlock | None:
        """Give the usable rows as one block, or None if there is none."""
        usable = np.ones(self._batch.num_rows, dtype=np.bool_)
        self._exclude_bad_lists(ids_column, usable, null_is_bad=True)
        labelled: BoolArray | None = None
        if labels_column is not None:
            labelled = self._batch.column(labels_column).is_valid().to_numpy(zero_copy_only=False)
            self._exclude_bad_lists(labels_column, usable, null_is_bad=False)
            self._exclude_unequal(ids_column, labels_column, usable & labelled)
            usable &= ~(labelled & (self._lengths(ids_column) != self._lengths(labels_column)))
            labelled = labelled[usable]
        rows = np.flatnonzero(usable)
        self._tally.rows_without_labels += len(rows) if labelled is None else int((~labelled).sum())
        if len(rows) == 0:
            return None
        ids, lengths = _flatten(self._batch.column(ids_column), rows)
        labels = None
        if labels_column is not None and labelled is not None and labelled.any():
            labels = np.zeros(len(ids), dtype=np.int64)
            given, _ = _flatten(self._batch.column(labels_column), rows[labelled])
            labels[np.repeat(labelled, lengths)] = given
        return TokenBlock(
            file=np.full(len(rows), self._file, dtype=np.int64),
            row=rows + self._first_row,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            ids=ids,
            ends=np.ones(len(rows), dtype=np.bool_),
            labels=labels,
            labelled=None if labels is None else labelled,
        )

    def _lengths(self, column: str) -> Int64Array:
        """Lengths of the lists; 0 for null."""
        return _lengths(self._batch.column(column))

    def _exclude_bad_lists(self, column: str, usable: BoolArray, *, null_is_bad: bool) -> None:
        """Clear `usable` where the list is null (if that is bad), empty, or holds a null."""
        array = self._batch.column(column)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        lengths = _lengths(array)
        for index in np.flatnonzero(usable & (lengths == 0)) if null_is_bad else ():
            self._bad(f"{column} is {'empty' if valid[index] else 'null'}", int(index))
            usable[index] = False
        if pa.types.is_null(array.type):
            return
        values = array.drop_null().flatten()  # skips what a null row or a slice hides, unlike `.values`
        if values.null_count == 0:
            return
        ends = np.cumsum(lengths)
        nulls = np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False))
        owners = np.searchsorted(ends, nulls, side="right")
        _, first_of_row = np.unique(owners, return_index=True)
        for at in first_of_row:
            row = int(owners[at])
            if usable[row]:
                position = int(nulls[at] - (ends[row] - lengths[row]))
                self._bad(f"{column} holds a null", row, position=position)
                usable[row] = False

    def _exclude_unequal(self, ids_column: str, labels_column: str, candidates: BoolArray) -> None:
        ids, labels = self._lengths(ids_column), self._lengths(labels_column)
        for row in np.flatnonzero(candidates & (ids != labels)):
            self._bad(f"{labels_column} and {ids_column} differ in length", int(row), f"{labels[row]} and {ids[row]}")


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lengths(array: Any) -> Int64Array:
    if pa.types.is_null(array.type):
        return np.zeros(len(array), dtype=np.int64)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    lengths[~array.is_valid().to_numpy(zero_copy_only=False)] = 0  # a null row of a fixed-size list has a length
    return np.asarray(lengths, dtype=np.int64)


def _flatten(array: Any, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Give the values of some rows, none of them null, and the rows' lengths."""
    kept = array if len(rows) == len(array) else array.take(pa.array(rows))
    values = kept.flatten().to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64:  # keep what int64 cannot hold too large, so that the check of ids names it
        values = np.minimum(values, np.uint64(np.iinfo(np.int64).max))
    return values.astype(np.int64), _lengths(kept)
