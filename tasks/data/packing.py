"""Which piece of which document goes into which sequence. Pure: sees lengths, never tokens.

A document that fits a sequence is never cut. A longer one is cut into pieces of a whole sequence and a rest (`split`),
or cut off (`truncate`), or left out (`drop`). Pieces are then placed by best fit, the longest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.machine_code import compiled
from tasks.data.epoch_order import permuted
from tasks.data.rows import Int64Array
from tasks.data.settings import LongDocuments

PACKING_STREAM = (1 << 64) - 1
"""Stream of the seed for the order of packing; epochs count up from 0."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of tokens, each of one document and at most a sequence long. Three int64 arrays of the same length."""

    document: Int64Array
    offset: Int64Array
    """Of the first token in its document."""
    length: Int64Array

    def take(self, order: Int64Array) -> Pieces:
        """Select pieces, in the order given."""
        return Pieces(self.document[order], self.offset[order], self.length[order])


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The sequences of a data set, before any epoch's permutation."""

    pieces: Pieces
    """In order of sequence, and of place in the sequence."""
    first: Int64Array
    """[sequences + 1] first piece of each sequence."""

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.first) - 1


def cut_documents(lengths: Int64Array, sequence_length: int, policy: LongDocuments) -> Pieces:
    """Make pieces of documents.

    Args:
        lengths: tokens of each document, at least 1.
        sequence_length: the longest piece.
        policy: for documents longer than that.
    """
    documents = np.arange(len(lengths))
    if policy == "drop":
        documents = documents[lengths <= sequence_length]
    if policy != "split":
        return Pieces(documents, np.zeros(len(documents), np.int64), np.minimum(lengths[documents], sequence_length))
    counts = -(-lengths // sequence_length)
    document = np.repeat(documents, counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = number * sequence_length
    return Pieces(document, offset, np.minimum(lengths[document] - offset, sequence_length))


def pack(pieces: Pieces, sequence_length: int, *, shuffle: bool, seed: int) -> PackingPlan:
    """Place pieces into sequences.

    With `shuffle`, the longest come first (fewest padding tokens), equals in seeded order. Without, pieces are placed
    in the order of the data: a sequence's number is that of its first piece, later short pieces fill its gaps.
    """
    count = len(pieces.length)
    if shuffle:
        order = permuted(np.arange(count), count, seed=seed, stream=PACKING_STREAM)
        order = order[np.argsort(-pieces.length[order], kind="stable")]
    else:
        order = np.arange(count)
    sequence = _best_fit(pieces.length[order], sequence_length)
    by_sequence = np.argsort(sequence, kind="stable")
    num_sequences = int(sequence.max()) + 1 if count else 0
    first = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=num_sequences))])
    return PackingPlan(pieces.take(order[by_sequence]), first.astype(np.int64))


def _best_fit_kernel(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Put each item into the fullest bin that still holds it, or a new one; O(log capacity) an item.

    `present` is a binary tree over remaining capacities: a node is set where some bin below it has room so much.
    Bins of the same room form a stack.
    """
    leaves = 1
    while leaves < capacity + 1:
        leaves *= 2
    present = np.zeros(2 * leaves, dtype=np.bool_)
    top = np.full(capacity + 1, -1, dtype=np.int64)
    below = np.full(len(lengths), -1, dtype=np.int64)
    bins = np.empty(len(lengths), dtype=np.int64)
    num_bins = 0
    for item in range(len(lengths)):
        node = leaves + lengths[item]
        while node > 0 and not present[node]:  # the nearest set node to the right
            while node > 1 and node & 1:
                node >>= 1
            node = node + 1 if node > 1 else 0
        if node == 0:
            chosen, room = num_bins, capacity
            num_bins += 1
        else:
            while node < leaves:  # its leftmost set leaf: the least room that suffices
                node = 2 * node if present[2 * node] else 2 * node + 1
            room = node - leaves
            chosen = top[room]
            top[room] = below[chosen]
            if top[room] < 0:
                present[node] = False
                while node > 1:
                    node >>= 1
                    present[node] = present[2 * node] or present[2 * node + 1]
        bins[item] = chosen
        room -= lengths[item]
        if room > 0:
            below[chosen] = top[room]
            top[room] = chosen
            node = leaves + room
            while node > 0 and not present[node]:
                present[node] = True
                node >>= 1
    return bins


_best_fit = compiled(_best_fit_kernel)
