"""Batches of a packed data set: for training from any position, the next one made in the background; for evaluation.

A step takes `sequences_per_step` consecutive places of the run. Epochs follow one another without a seam: a step
that reaches the end of an epoch takes the rest of its sequences from the next, so none is dropped, every step is
full, and a data set smaller than a step is repeated within it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from pipeline.errors import PipelineError
from pipeline.messages import IGNORED, Batch, DataPosition
from tasks.data.dataset import PAD_ID, PackedDataset
from tasks.data.settings import DataError


class BatchError(PipelineError):
    """A batch could not be prepared: a fault of the run (a lost disk, a bug), not of what the user asked for."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step trains on."""

    batch: Batch
    position_after: DataPosition
    """Where the next step begins: what a checkpoint after this step records."""
    wait_s: float
    """How long the caller waited for it."""


class BatchLoader:
    """Gives the batch of step after step. Owns one thread; close it, or use it as a context manager."""

    def __init__(
        self, dataset: PackedDataset, *, sequences_per_step: int, micro_batch: int, position: DataPosition
    ) -> None:
        """Start to prepare the first batch.

        Args:
            dataset: where sequences come from.
            sequences_per_step: over all micro-batches.
            micro_batch: sequences of a micro-batch.
            position: where to begin; `DataPosition()` for a new run.

        Raises:
            DataError: the sizes do not divide, or the position lies outside the data set.
        """
        if micro_batch < 1 or sequences_per_step < 1 or sequences_per_step % micro_batch:
            raise DataError(
                f"sequences_per_step {sequences_per_step} must be a positive multiple of micro_batch {micro_batch}"
            )
        if not 0 <= position.sequence < dataset.num_sequences or position.epoch < 0:
            raise DataError(
                f"data position {position} lies outside epochs of {dataset.num_sequences} sequences; "
                "was the run started with other data?"
            )
        self._dataset = dataset
        self._sequences_per_step = sequences_per_step
        self._micro_batch = micro_batch
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._position = position
        self._pending: Future[Batch] = self._submit()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread, and wait until it has stopped."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def next(self) -> StepBatch:
        """Give the batch of the next step and start on the one after it.

        Raises:
            BatchError: it could not be prepared; the cause is attached. The loader stays at that step.
        """
        start_s = time.monotonic()
        try:
            batch = self._pending.result()
        except Exception as error:
            raise BatchError(f"the batch at {self._position} could not be prepared: {error}") from error
        wait_s = time.monotonic() - start_s
        self._position = advance(self._position, self._sequences_per_step, self._dataset.num_sequences)
        self._pending = self._submit()
        return StepBatch(batch, self._position, wait_s)

    def _submit(self) -> Future[Batch]:
        return self._executor.submit(
            train_batch, self._dataset, self._position, self._sequences_per_step, self._micro_batch
        )


def advance(position: DataPosition, sequences: int, num_sequences: int) -> DataPosition:
    """Move a position on, over ends of epochs."""
    epochs, sequence = divmod(position.sequence + sequences, num_sequences)
    return DataPosition(position.epoch + epochs, sequence)


def train_batch(dataset: PackedDataset, position: DataPosition, sequences_per_step: int, micro_batch: int) -> Batch:
    """Make the batch at a position: a pure function of the data set and the position."""
    places = position.sequence + np.arange(sequences_per_step)
    indices = np.empty(sequences_per_step, dtype=np.int64)
    for lap in range(int(places[-1]) // dataset.num_sequences + 1):
        in_epoch = places // dataset.num_sequences == lap
        indices[in_epoch] = dataset.order(position.epoch + lap, places[in_epoch] % dataset.num_sequences)
    return _batch(dataset, indices.tolist(), micro_batch)


def eval_batches(dataset: PackedDataset, micro_batch: int, micro_batches_per_pass: int) -> Iterator[Batch]:
    """Yield all sequences once, in a fixed order.

    The last batch may have fewer micro-batches; sequences that its last micro-batch lacks are padding without targets.

    Args:
        dataset: what to evaluate on.
        micro_batch: sequences of a micro-batch.
        micro_batches_per_pass: the most micro-batches of one batch.
    """
    per_pass = micro_batch * micro_batches_per_pass
    for first in range(0, dataset.num_sequences, per_pass):
        indices: list[int | None] = list(range(first, min(first + per_pass, dataset.num_sequences)))
        yield _batch(dataset, indices + [None] * (-len(indices) % micro_batch), micro_batch)


def _batch(dataset: PackedDataset, indices: Sequence[int | None], micro_batch: int) -> Batch:
    """Fill a batch; None is a sequence of padding."""
    shape = (len(indices), dataset.sequence_length)
    input_ids = np.full(shape, PAD_ID, dtype=np.int32)
    targets = np.full(shape, IGNORED, dtype=np.int32)
    position_ids = np.tile(np.arange(dataset.sequence_length, dtype=np.int32), (len(indices), 1))
    tokens = supervised_tokens = 0
    single_document = True
    for row, index in enumerate(indices):
        if index is None:
            single_document = False
            continue
        counts = dataset.write_sequence(index, input_ids[row], targets[row], position_ids[row])
        tokens += counts.tokens
        supervised_tokens += counts.supervised_tokens
        single_document &= counts.is_one_document
    micro_batches = (len(indices) // micro_batch, micro_batch, dataset.sequence_length)
    return Batch(
        input_ids=input_ids.reshape(micro_batches),
        targets=targets.reshape(micro_batches),
        position_ids=position_ids.reshape(micro_batches),
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        single_document=single_document,
    )
