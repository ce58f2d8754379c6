"""The table of documents in memory, and what is done to it before packing: holding some out, shortening long ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.messages import IGNORED
from tasks.data.epoch_order import mix
from tasks.data.rows import BoolArray, Int64Array
from tasks.data.settings import DataError, LongDocuments, OnBadRow
from tasks.data.token_cache import UNLABELLED, TokenCache

TRUNCATED_AWAY = "no supervised token after truncation"


@dataclass(frozen=True, slots=True)
class Documents:
    """Where each document lies in a cache. Arrays of the same length."""

    record: Int64Array
    """Its number in the cache."""
    start: Int64Array
    length: Int64Array
    label_start: Int64Array
    """UNLABELLED where every token but the first is a target."""
    supervised: Int64Array
    checksum: npt.NDArray[np.uint32]

    @staticmethod
    def of(cache: TokenCache) -> Documents:
        """All documents of a cache."""
        records = cache.documents
        return Documents(
            np.arange(len(records)),
            *(np.array(records[name]) for name in ("start", "length", "label_start", "supervised", "checksum")),
        )

    @property
    def count(self) -> int:
        """How many documents there are."""
        return len(self.record)

    def where(self, mask: BoolArray) -> Documents:
        """Select documents."""
        return Documents(
            self.record[mask],
            self.start[mask],
            self.length[mask],
            self.label_start[mask],
            self.supervised[mask],
            self.checksum[mask],
        )


def held_out_split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents | None]:
    """Choose the held-out documents: those whose content hashes lowest, at least one.

    Equal documents stay on one side. A single document is divided instead, its end held out: a text file is
    one document, and training on one file is usual.

    Returns:
        What to train on, and what is held out (None for fraction 0).

    Raises:
        DataError: nothing would be left on one side.
    """
    if fraction == 0.0:
        return documents, None
    if documents.count == 1:
        return _divide(documents, fraction)
    ranks = mix(documents.checksum.astype(np.uint64) ^ mix(np.uint64(seed % (1 << 64))))
    wanted = max(1, round(fraction * documents.count))
    held = ranks <= np.partition(ranks, wanted - 1)[wanted - 1]
    if held.all():
        raise DataError(
            f"data.eval_fraction {fraction} holds out all {documents.count} documents (equal documents stay together); "
            "lower it, or name separate data for evaluation"
        )
    return documents.where(~held), documents.where(held)


def _divide(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    length = int(documents.length[0])
    held = max(2, round(fraction * length))
    if length - held < 2 or documents.label_start[0] != UNLABELLED:
        raise DataError(
            f"data.eval_fraction {fraction} cannot hold out a part of the only document ({length} tokens); "
            "give more documents, or separate data for evaluation"
        )

    def part(start: int, size: int) -> Documents:
        return Documents(
            documents.record,
            documents.start + start,
            np.array([size]),
            documents.label_start,
            np.array([size - 1]),
            documents.checksum,
        )

    return part(0, length - held), part(length - held, held)


def shorten(
    documents: Documents, cache: TokenCache, sequence_length: int, policy: LongDocuments, on_bad_row: OnBadRow
) -> tuple[Documents, tuple[tuple[str, int], ...]]:
    """Apply `truncate` and `drop` to documents longer than a sequence; `split` leaves them whole.

    Returns:
        The documents to pack, their supervised tokens counted again, and (reason, documents) left out.

    Raises:
        DataError: truncation cuts off every target of a document, and bad rows are refused.
    """
    is_long = documents.length > sequence_length
    if policy == "split" or not is_long.any():
        return documents, ()
    if policy == "drop":
        return documents.where(~is_long), (("longer than a sequence", int(is_long.sum())),)
    length = np.minimum(documents.length, sequence_length)
    supervised = np.where(is_long, length - 1, documents.supervised)
    for index in np.flatnonzero(is_long & (documents.label_start != UNLABELLED)):
        first = int(documents.label_start[index])
        supervised[index] = int((cache.labels[first + 1 : first + sequence_length] != IGNORED).sum())
    lost = (supervised == 0) & (documents.supervised > 0)
    if lost.any() and on_bad_row == "error":
        worst = int(np.flatnonzero(lost)[0])
        raise DataError(
            f"{cache.place(int(documents.record[worst]))}: {TRUNCATED_AWAY} to {sequence_length} of "
            f"{documents.length[worst]} tokens ({lost.sum()} such rows); raise train.sequence_length, or leave such "
            'rows out: data.on_bad_row = "skip"'
        )
    kept = Documents(
        documents.record, documents.start, length, documents.label_start, supervised, documents.checksum
    ).where(~lost)
    return kept, ((TRUNCATED_AWAY, int(lost.sum())),) if lost.any() else ()
