"""Tokens of all documents on disk, flat and memory-mapped, written once and reused by every later run.

A cache directory holds one directory for each fingerprint of (files, settings):

    header.json     CacheHeader: element type, counts, what was read and left out
    tokens.bin      ids of all documents, end to end
    documents.bin   one DOCUMENT record each
    labels.bin      int32 labels of the documents that have labels, end to end

`cache_writer` writes it beside its place and renames it when complete, so a directory of that name is whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.parsing import parse_json

FORMAT_VERSION = 2
"""2: the header has a checksum of the labels, and tells bytes from other tokens."""

UNLABELLED = -1
"""`label_start` of a document that has no labels of its own."""

DOCUMENT = np.dtype(
    [
        ("start", "<i8"),  # in tokens.bin, elements
        ("length", "<i8"),
        ("label_start", "<i8"),  # in labels.bin, elements, or UNLABELLED
        ("supervised", "<i8"),  # tokens after the first whose label is not IGNORED
        ("row", "<i8"),
        ("file", "<i4"),
        ("checksum", "<u4"),  # CRC-32 of the ids as int32: equal documents are held out together
    ]
)


@dataclass(frozen=True, slots=True)
class CacheHeader:
    """What stands in header.json."""

    format_version: int
    dtype: str
    num_tokens: int
    num_documents: int
    num_labels: int
    labels_checksum: int
    """CRC-32 of labels.bin; 0 where there are none."""
    max_id: int
    """Of ids and labels."""
    tokenizer_vocabulary_size: int
    """0 where no text was tokenised."""
    bytes_tokenised: bool
    """Whether text was, and every byte is a token."""
    files: tuple[str, ...]
    rows: int
    rows_without_labels: int
    dropped: tuple[tuple[str, int], ...]
    """(reason, rows), by reason."""


@dataclass(frozen=True)
class TokenCache:
    """An open cache. The arrays are read-only views of the files."""

    header: CacheHeader
    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.void]
    labels: npt.NDArray[np.int32]

    def place(self, document: int) -> str:
        """Name the file and row that a document came from."""
        record = self.documents[document]
        return f"{self.header.files[record['file']]}:{record['row']}"


STORAGE_DTYPES = ("<u2", "<i4")


def storage_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the smallest element type that holds every id below `vocab_size`."""
    return np.dtype(STORAGE_DTYPES[vocab_size > 1 << 16])


def open_cache(directory: Path) -> TokenCache | None:
    """Open a complete cache, or give None where there is none of this format, or a file of it is damaged."""
    try:
        header = _header(parse_json((directory / "header.json").read_text(encoding="utf-8")))
        cache = TokenCache(
            header,
            _map(directory / "tokens.bin", np.dtype(header.dtype), header.num_tokens),
            _map(directory / "documents.bin", DOCUMENT, header.num_documents),
            _map(directory / "labels.bin", np.dtype("<i4"), header.num_labels),
        )
        _check_documents(cache)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError):
        return None
    return cache


def _header(fields: Any) -> CacheHeader:
    """Raises ValueError, KeyError or TypeError for what `CacheWriter` does not write."""
    if fields["format_version"] != FORMAT_VERSION or fields["dtype"] not in STORAGE_DTYPES:
        raise ValueError("another format")
    if not isinstance(fields["files"], list) or not isinstance(fields["dropped"], list):
        raise TypeError("no list")
    fields["files"] = tuple(fields["files"])
    fields["dropped"] = tuple((reason, count) for reason, count in fields["dropped"])
    header = CacheHeader(**fields)
    kinds = {"int": int, "str": str, "bool": bool}
    typed = [(getattr(header, field.name), kinds.get(str(field.type))) for field in dataclasses.fields(header)]
    typed += [(file, str) for file in header.files]
    typed += [(value, kind) for each in header.dropped for value, kind in zip(each, (str, int), strict=True)]
    if any(kind is not None and type(value) is not kind for value, kind in typed):
        raise TypeError("another type")
    return header


def _check_documents(cache: TokenCache) -> None:
    """Raises ValueError where a document lies outside the arrays: who reads them trusts it."""
    header, documents = cache.header, cache.documents
    labelled = documents["label_start"] != UNLABELLED
    for start, size, kind in (
        (documents["start"], header.num_tokens, slice(None)),
        (documents["label_start"], header.num_labels, labelled),
    ):
        first, length = start[kind], documents["length"][kind]
        if ((first < 0) | (length < 1) | (first > size - length)).any():
            raise ValueError("a document lies outside its file")
    if ((documents["file"] < 0) | (documents["file"] >= len(header.files))).any():
        raise ValueError("a document is of no file")


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, its header says {count * dtype.itemsize}")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
