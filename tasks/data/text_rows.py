"""Reads plain text (a file is a document) and JSON lines (a line is a document)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tasks.data.rows import RowTally, TextRow, TokenBlock, describe_row
from tasks.data.settings import DataSettings
from tasks.data.sources import SourceFile
from tiers.parsing import parse_json

TEXT_PIECE_BYTES = 4 << 20
"""Larger texts are tokenised in pieces of about this size, so that memory does not grow with a file."""


def read_text_file(
    files: tuple[SourceFile, ...], file: int, tally: RowTally, *, needs_utf8: bool, advance: Callable[[float], None]
) -> Iterator[TextRow]:
    """Yield the document of a text file, in pieces when it is large.

    Pieces end after a line break that is followed by something other than white space, where byte-level BPE
    tokenizers break too. Files without such places are cut where the piece ends.

    Args:
        files: all source files.
        file: index of the one to read.
        tally: counts the row. An empty file is left out in any case: it is common in directories of sources.
        needs_utf8: the tokenizer takes text, so a file that is not UTF-8 is a bad row.
        advance: told how many bytes were read.
    """
    tally.rows += 1
    path = files[file].path
    if needs_utf8 and (invalid := first_invalid_utf8(path)) is not None:
        tally.bad("not UTF-8", describe_row(files, file, 1), f"byte {invalid} of the file")
        return
    rest = b""
    starts = True
    with path.open("rb") as stream:
        while True:
            read = stream.read(TEXT_PIECE_BYTES)
            advance(len(read))
            if not read:
                break
            pending = rest + read
            cut = _cut_after_line(pending) if len(pending) >= TEXT_PIECE_BYTES else 0
            rest = pending[cut:]
            if cut:
                yield TextRow(file, 1, pending[:cut], starts_document=starts, ends_document=False)
                starts = False
    if starts and not rest:
        tally.drop("empty file")
        return
    # The last piece may be empty; it still carries the end of the document.
    yield TextRow(file, 1, rest, starts_document=starts)


def _cut_after_line(text: bytes) -> int:
    """Find where to end a piece, not at the very end: what follows decides."""
    at = len(text) - 1
    while (at := text.rfind(b"\n", 0, at)) > 0:
        if not text[at + 1 : at + 2].isspace():
            return at + 1
    at = len(text) - 1
    while at > 0 and text[at] & 0xC0 == 0x80:  # never inside a UTF-8 character
        at -= 1
    return at


def first_invalid_utf8(path: Path) -> int | None:
    """Give the byte offset of the first byte that is not UTF-8, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with path.open("rb") as stream:
        while True:
            read = stream.read(TEXT_PIECE_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(read, final=not read)
            except UnicodeDecodeError as error:
                return done - pending + error.start
            if not read:
                return None
            done += len(read)


def read_jsonl_file(
    files: tuple[SourceFile, ...],
    file: int,
    settings: DataSettings,
    tally: RowTally,
    *,
    advance: Callable[[float], None],
) -> Iterator[TextRow | TokenBlock]:
    """Yield a row for every line: token ids where the line has them, else text. Blank lines are no rows."""
    with files[file].path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            advance(len(line))
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            tally.rows += 1
            row = _read_line(line, files, file, number, settings, tally)
            if row is not None:
                yield row


def _read_line(
    line: bytes, files: tuple[SourceFile, ...], file: int, number: int, settings: DataSettings, tally: RowTally
) -> TextRow | TokenBlock | None:
    place = describe_row(files, file, number)
    try:
        fields = parse_json(line)
    except ValueError as error:  # also UnicodeDecodeError
        tally.bad("not a line of JSON", place, str(error))
        return None
    if not isinstance(fields, dict):
        tally.bad("not a JSON object", place, f"a {type(fields).__name__}")
        return None
    if settings.input_ids_column in fields:
        return _read_ids(fields, file, number, place, settings, tally)
    text = fields.get(settings.text_field)
    if text is None:
        tally.bad("no text", place, f"fields {sorted(fields)}, wanted {settings.text_field!r}")
    elif not isinstance(text, str):
        tally.bad("text is not a string", place, f"{settings.text_field} is a {type(text).__name__}")
    elif not text:
        tally.bad("empty text", place)
    else:
        try:
            return TextRow(file, number, text.encode())
        except UnicodeEncodeError as error:
            tally.bad("text is not valid Unicode", place, f"character {error.start}")
    return None


def _read_ids(
    fields: dict[str, object], file: int, number: int, place: str, settings: DataSettings, tally: RowTally
) -> TokenBlock | None:
    ids = _integers(fields[settings.input_ids_column], settings.input_ids_column, place, tally)
    if ids is None:
        return None
    labels = None
    given = fields.get(settings.labels_column) if settings.labels_column else None
    if given is not None:
        labels = _integers(given, settings.labels_column or "", place, tally)
        if labels is None:
            return None
        if len(labels) != len(ids):
            tally.bad("labels and input_ids differ in length", place, f"{len(labels)} and {len(ids)}")
            return None
    else:
        tally.rows_without_labels += 1
    return TokenBlock(
        file=np.array([file]),
        row=np.array([number]),
        offsets=np.array([0, len(ids)]),
        ids=np.array(ids, dtype=np.int64),
        ends=np.array([True]),
        labels=None if labels is None else np.array(labels, dtype=np.int64),
        labelled=None if labels is None else np.array([True]),
    )


def _integers(values: object, column: str, place: str, tally: RowTally) -> list[int] | None:
    if not isinstance(values, list):
        tally.bad(f"{column} is not a list", place, f"a {type(values).__name__}")
        return None
    if not values:
        tally.bad(f"{column} is empty", place)
        return None
    for position, value in enumerate(values):
        if type(value) is not int:  # bool is an int to isinstance
            tally.bad(f"{column} holds something other than integers", f"{place}:{position}", repr(value)[:80])
            return None
        if not -(1 << 63) <= value < 1 << 63:
            tally.bad(f"{column} holds a number beyond 64 bits", f"{place}:{position}")
            return None
    return values
