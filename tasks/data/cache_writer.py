"""Writes a token cache, block by block, and makes it appear at its place when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.messages import IGNORED
from tasks.data.rows import Int64Array, TokenBlock
from tasks.data.settings import DataError
from tasks.data.token_cache import DOCUMENT, FORMAT_VERSION, UNLABELLED, CacheHeader
from tiers.durable_files import FILE_MODE, make_directory, naming, sync_directory, write_file


class CacheWriter:
    """Writes a cache. As a context manager it removes what was not published."""

    def __init__(self, directory: Path, dtype: np.dtype[Any]) -> None:
        """Start a cache that will stand at `directory`, in elements of `dtype`."""
        self._directory = directory
        self._partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
        self._dtype = dtype
        _remove_abandoned(directory)
        shutil.rmtree(self._partial, ignore_errors=True)
        make_directory(self._partial)
        self._tokens = self._open("tokens.bin")
        self._labels = self._open("labels.bin")
        self._documents = self._open("documents.bin")
        self.num_tokens = 0
        self.num_documents = 0
        self.empty_documents = 0
        self._num_labels = 0
        self._labels_checksum = 0
        self._max_id = -1
        self._open_start = 0
        self._open_checksum = 0

    def _open(self, name: str) -> BinaryIO:
        return os.fdopen(os.open(self._partial / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, FILE_MODE), "wb")

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._tokens, self._labels, self._documents):
            # A full disk refuses what is still in the buffer, and with it nothing is lost: it was not published.
            with contextlib.suppress(OSError):
                stream.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, block: TokenBlock) -> None:
        """Append a block; a document that the last block left open goes on with it.

        Raises:
            DataError: an id does not fit the element type.
            OSError: The disk refuses, naming the cache.
        """
        with naming(self._directory):
            self._add(block)

    def _add(self, block: TokenBlock) -> None:
        if len(block.ids):
            self._max_id = max(self._max_id, int(block.ids.max()))
        if self._max_id > np.iinfo(self._dtype).max or (len(block.ids) and block.ids.min() < 0):
            raise DataError(f"token ids from {block.ids.min()} to {self._max_id} do not fit {self._dtype}")
        self._tokens.write(block.ids.astype(self._dtype).tobytes())
        ends = block.offsets[1:][block.ends]
        records = np.zeros(len(ends), DOCUMENT)
        bounds = self.num_tokens + ends
        records["start"] = np.concatenate([[self._open_start], bounds[:-1]])[: len(ends)]
        records["length"] = bounds - records["start"]
        records["file"], records["row"] = block.file[block.ends], block.row[block.ends]
        records["supervised"] = np.maximum(records["length"] - 1, 0)
        records["label_start"] = UNLABELLED
        records["checksum"] = self._checksums(block.ids, ends)
        if block.labels is not None:
            self._add_labels(block, records)
        self.num_tokens += len(block.ids)
        if len(ends):
            self._open_start = int(bounds[-1])
        kept = records[records["length"] > 0]
        self.empty_documents += len(records) - len(kept)
        self.num_documents += len(kept)
        self._documents.write(kept.tobytes())

    def _checksums(self, ids: Int64Array, ends: Int64Array) -> list[int]:
        raw = memoryview(ids.astype("<i4").tobytes())
        checksums, start, running = [], 0, self._open_checksum
        for end in ends.tolist():
            checksums.append(zlib.crc32(raw[4 * start : 4 * end], running))
            start, running = end, 0
        self._open_checksum = zlib.crc32(raw[4 * start :], running)
        return checksums

    def _add_labels(self, block: TokenBlock, records: npt.NDArray[np.void]) -> None:
        assert block.labels is not None and block.labelled is not None and block.ends.all()
        lengths = np.diff(block.offsets)
        owned = np.where(block.labelled, lengths, 0)
        starts = self._num_labels + np.cumsum(owned) - owned
        records["label_start"] = np.where(block.labelled, starts, UNLABELLED)
        labels = block.labels[np.repeat(block.labelled, lengths)]
        if len(labels):
            self._max_id = max(self._max_id, int(labels.max()))
        supervised = block.labels != IGNORED
        supervised[block.offsets[:-1][lengths > 0]] = False  # nothing predicts the first token
        running = np.concatenate([[0], np.cumsum(supervised)])
        counts = running[block.offsets[1:]] - running[block.offsets[:-1]]
        records["supervised"] = np.where(block.labelled, counts, records["supervised"])
        raw = labels.astype("<i4").tobytes()
        self._labels_checksum = zlib.crc32(raw, self._labels_checksum)
        self._labels.write(raw)
        self._num_labels += int(owned.sum())

    def publish(
        self,
        *,
        tokenizer_vocabulary_size: int,
        bytes_tokenised: bool,
        files: tuple[str, ...],
        rows: int,
        rows_without_labels: int,
        dropped: tuple[tuple[str, int], ...],
    ) -> None:
        """Make the cache appear at its place, whole and durable.

        Raises:
            OSError: The disk refuses, naming the cache.
        """
        header = CacheHeader(
            format_version=FORMAT_VERSION,
            dtype=self._dtype.str,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_labels=self._num_labels,
            labels_checksum=self._labels_checksum,
            max_id=self._max_id,
            tokenizer_vocabulary_size=tokenizer_vocabulary_size,
            bytes_tokenised=bytes_tokenised,
            files=files,
            rows=rows,
            rows_without_labels=rows_without_labels,
            dropped=dropped,
        )
        with naming(self._directory):
            for stream in (self._tokens, self._labels, self._documents):
                stream.flush()
                os.fsync(stream.fileno())
        write_file(self._partial / "header.json", json.dumps(asdict(header), indent=1).encode())
        # What stands there is of an older format or damaged: `open_cache` has refused it.
        shutil.rmtree(self._directory, ignore_errors=True)
        sync_directory(self._partial)
        self._partial.rename(self._directory)
        sync_directory(self._directory.parent)


def _remove_abandoned(directory: Path) -> None:
    """Remove what killed processes left behind; those that still run keep theirs."""
    for partial in directory.parent.glob(f"{directory.name}.partial-*"):
        pid = partial.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(partial, ignore_errors=True)
