"""A packed data set: the sequences of a run, each to be had by its number at once.

`open_dataset` is the one entry point of this folder, `loader.BatchLoader` the consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.messages import IGNORED, TokenArray
from tasks.data.documents import Documents, held_out_split, shorten
from tasks.data.epoch_order import permuted
from tasks.data.fingerprint import combine, content, content_without_labels
from tasks.data.packing import PackingPlan, cut_documents, pack
from tasks.data.report import DataReport
from tasks.data.rows import Int64Array
from tasks.data.settings import DataError, DataSettings
from tasks.data.token_cache import UNLABELLED, TokenCache
from tasks.data.tokenise import no_documents, tokenise

PAD_ID = 0
"""Any id of the vocabulary will do: nothing attends to padding and it has no target."""


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """What a sequence holds."""

    tokens: int
    supervised_tokens: int
    is_one_document: bool
    """One piece that fills the sequence."""


@dataclass(frozen=True)
class PackedDataset:
    """Sequences of packed documents. Memory: 24 bytes a piece and 24 a document; tokens stay on disk."""

    cache: TokenCache
    documents: Documents
    plan: PackingPlan
    report: DataReport
    sequence_length: int
    seed: int
    shuffle: bool
    fingerprint: str
    """Equal fingerprints give equal batches at equal positions: a checkpoint records it beside the position."""
    fingerprint_without_labels: str
    """What the first versions recorded: the same, save that of labels they noticed only a change of their number."""
    held_out: PackedDataset | None = None
    """The documents held out by `eval_fraction`, packed alike, never shuffled."""

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch, at least 1."""
        return self.plan.num_sequences

    @property
    def bytes_tokenised(self) -> bool:
        """Whether it is text as raw bytes, all or in part."""
        return self.cache.header.bytes_tokenised

    def order(self, epoch: int, places: Int64Array) -> Int64Array:
        """Say which sequences stand at places of an epoch. O(places), whatever the epoch."""
        if not self.shuffle:
            return places
        return permuted(places, self.num_sequences, seed=self.seed, stream=epoch)

    def write_sequence(
        self, index: int, input_ids: TokenArray, targets: TokenArray, position_ids: TokenArray
    ) -> SequenceCounts:
        """Fill one sequence into rows that the caller owns, int32 [sequence_length] each.

        The target of a position is the next token of its document, so a document's last token has none and nothing
        predicts its first. Where a document is split, the last token of a piece still predicts the first of the next
        piece, so a split loses no target; attention and positions start anew in every piece.
        """
        pieces, documents = self.plan.pieces, self.documents
        first, last = int(self.plan.first[index]), int(self.plan.first[index + 1])
        at = 0
        targets[:] = IGNORED
        for piece in range(first, last):
            document, offset, length = (
                int(pieces.document[piece]),
                int(pieces.offset[piece]),
                int(pieces.length[piece]),
            )
            start = int(documents.start[document]) + offset
            input_ids[at : at + length] = self.cache.tokens[start : start + length]
            position_ids[at : at + length] = np.arange(length, dtype=np.int32)
            predicted = min(length, int(documents.length[document]) - offset - 1)
            label_start = int(documents.label_start[document])
            if label_start == UNLABELLED:
                targets[at : at + predicted] = self.cache.tokens[start + 1 : start + 1 + predicted]
            else:
                label_start += offset + 1
                targets[at : at + predicted] = self.cache.labels[label_start : label_start + predicted]
            at += length
        input_ids[at:] = PAD_ID
        position_ids[at:] = np.arange(self.sequence_length - at, dtype=np.int32)  # padding is a document of its own
        return SequenceCounts(
            tokens=at,
            supervised_tokens=int((targets != IGNORED).sum()),
            is_one_document=last - first == 1 and at == self.sequence_length,
        )


def open_dataset(
    settings: DataSettings,
    *,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    cache_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> PackedDataset:
    """Read, tokenise (or reuse the cache) and pack.

    Args:
        settings: the user's.
        sequence_length: tokens of a sequence.
        seed: of packing, of the order of every epoch, and of the held-out choice.
        vocab_size: rows of the model's embedding.
        cache_dir: where token caches live; made if absent.
        progress: told a line every few seconds while tokenising.

    Raises:
        DataError: the data cannot be read or nothing is left to train on.
    """
    if sequence_length < 2:
        raise DataError(f"sequence_length is {sequence_length}; a target needs at least 2 tokens")
    cache = tokenise(settings, vocab_size=vocab_size, cache_dir=cache_dir, report=progress)
    training, held_out = held_out_split(Documents.of(cache), settings.eval_fraction, seed)
    packing = (sequence_length, seed, settings.shuffle, settings.long_documents, settings.eval_fraction)
    contents = content(cache), content_without_labels(cache)
    eval_dataset = None
    if held_out is not None:
        names = [combine("held out", each, *packing) for each in contents]
        eval_dataset = _pack(settings, cache, held_out, sequence_length, seed, False, *names)
    names = [combine(each, *packing) for each in contents]
    return _pack(settings, cache, training, sequence_length, seed, settings.shuffle, *names, held_out=eval_dataset)


def _pack(
    settings: DataSettings,
    cache: TokenCache,
    documents: Documents,
    sequence_length: int,
    seed: int,
    shuffle: bool,
    fingerprint: str,
    fingerprint_without_labels: str,
    *,
    held_out: PackedDataset | None = None,
) -> PackedDataset:
    num_documents, num_tokens = documents.count, int(documents.length.sum())
    num_long = int((documents.length > sequence_length).sum())
    documents, left_out = shorten(documents, cache, sequence_length, settings.long_documents, settings.on_bad_row)
    if documents.count == 0:
        raise no_documents(settings, cache.header.rows, cache.header.dropped + left_out)
    pieces = cut_documents(documents.length, sequence_length, settings.long_documents)
    plan = pack(pieces, sequence_length, shuffle=shuffle, seed=seed)
    tokens = int(pieces.length.sum())
    report = DataReport(
        num_files=len(cache.header.files),
        rows=cache.header.rows,
        rows_left_out=cache.header.dropped,
        rows_without_labels=cache.header.rows_without_labels if cache.header.num_labels else 0,
        documents=num_documents,
        documents_left_out=left_out,
        documents_split=num_long if settings.long_documents == "split" else 0,
        documents_truncated=num_long if settings.long_documents == "truncate" else 0,
        documents_without_target=int((documents.supervised == 0).sum()),
        sequence_length=sequence_length,
        sequences=plan.num_sequences,
        tokens=tokens,
        supervised_tokens=int(documents.supervised.sum()),
        padding_tokens=plan.num_sequences * sequence_length - tokens,
        dropped_tokens=num_tokens - tokens,
    )
    return PackedDataset(
        cache,
        documents,
        plan,
        report,
        sequence_length,
        seed,
        shuffle,
        fingerprint,
        fingerprint_without_labels,
        held_out,
    )
