"""Checks token ids and labels on the host, before they can become an out-of-range access on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.messages import IGNORED
from tasks.data.rows import BoolArray, Int64Array, TokenBlock, describe_row
from tasks.data.settings import DataError
from tasks.data.sources import SourceFile

ENOUGH_LABELS = 64
"""Supervised labels to see before judging whether they are shifted: chance equality stays far from the bounds."""


@dataclass(slots=True)
class BlockChecker:
    """Checks block after block; `finish` once at the end."""

    files: tuple[SourceFile, ...]
    vocab_size: int
    _same: int = 0
    _next: int = 0
    _labels: int = 0
    _first_labelled: str = ""

    def check(self, block: TokenBlock) -> None:
        """Check one block.

        Raises:
            DataError: an id is outside [0, vocab_size), or a label is neither there nor -100.
        """
        wrong = _first_outside(block.ids, self.vocab_size)
        if wrong is not None:
            raise DataError(
                f"{self._place(block, wrong)}: token id {block.ids[wrong]} is outside the model's vocabulary "
                f"[0, {self.vocab_size}); tokenise with the model's own tokenizer, or enlarge its vocabulary"
            )
        if block.labels is None or block.labelled is None:
            return
        labelled = np.repeat(block.labelled, np.diff(block.offsets))
        labels = np.where(labelled, block.labels, IGNORED)
        supervised = labels != IGNORED
        wrong = _first_outside(np.where(supervised, labels, 0), self.vocab_size)
        if wrong is not None:
            raise DataError(
                f"{self._place(block, wrong)}: label {labels[wrong]} is neither {IGNORED} (ignored) "
                f"nor a token id below {self.vocab_size}; only {IGNORED} masks a position"
            )
        self._count_shift(block, labels, supervised)

    def _count_shift(self, block: TokenBlock, labels: Int64Array, supervised: BoolArray) -> None:
        if not self._first_labelled:
            self._first_labelled = describe_row(self.files, int(block.file[0]), int(block.row[0]))
        has_next = np.ones(len(labels), dtype=np.bool_)
        has_next[block.offsets[1:] - 1] = False
        compared = supervised & has_next
        self._labels += int(compared.sum())
        self._same += int((compared & (labels == block.ids)).sum())
        self._next += int((compared & (labels == np.roll(block.ids, -1))).sum())
        if self._labels >= ENOUGH_LABELS:
            self.finish()

    def finish(self) -> None:
        """Refuse labels that are already shifted: the loss would train the token after the next.

        Raises:
            DataError: nearly every label equals the next token and few equal their own.
        """
        if self._labels >= 4 and self._next > 0.9 * self._labels and self._same < 0.5 * self._labels:
            raise DataError(
                f"{self._first_labelled}: labels are already shifted ({self._next} of {self._labels} equal the next "
                f"token, {self._same} their own); give labels unshifted, labels[i] for input_ids[i], as in Hugging Face"
            )

    def _place(self, block: TokenBlock, index: int) -> str:
        return describe_row(self.files, *block.locate(index))


def _first_outside(values: Int64Array, limit: int) -> int | None:
    if len(values) == 0 or (values.min() >= 0 and values.max() < limit):
        return None
    return int(np.flatnonzero((values < 0) | (values >= limit))[0])
