"""Steps follow one another over the ends of epochs, and any of them can be had again from its position."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from pipeline.messages import IGNORED, Batch, DataPosition
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.data.loader import BatchError, BatchLoader, StepBatch, advance, eval_batches, train_batch
from tasks.data.settings import DataError, DataSettings


@pytest.fixture
def dataset(tmp_path: Path) -> PackedDataset:
    """Ten sequences of 4 bytes; the first byte of sequence i is 10 * i."""
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(10 * (i // 4) + i % 4 for i in range(40)))
    settings = DataSettings(paths=(path,), append_eos=False)
    return open_dataset(settings, sequence_length=4, seed=11, vocab_size=256, cache_dir=tmp_path / "cache")


def numbers(batch: Batch) -> list[int]:
    return [int(i) // 10 for i in batch.input_ids[:, :, 0].ravel()]


def steps(dataset: PackedDataset, count: int, position: DataPosition, **sizes: int) -> list[StepBatch]:
    with BatchLoader(
        dataset, sequences_per_step=sizes.get("step", 4), micro_batch=sizes.get("micro", 2), position=position
    ) as loader:
        return [loader.next() for _ in range(count)]


def test_steps_carry_over_the_ends_of_epochs(dataset: PackedDataset) -> None:
    taken = steps(dataset, 5, DataPosition())
    order = [number for step in taken for number in numbers(step.batch)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]  # each epoch has an order of its own
    assert [step.position_after for step in taken] == [
        DataPosition(0, 4),
        DataPosition(0, 8),
        DataPosition(1, 2),
        DataPosition(1, 6),
        DataPosition(2, 0),
    ]
    assert taken[0].batch.input_ids.shape == (2, 2, 4)


def test_resumed_batches_equal_uninterrupted_ones(dataset: PackedDataset) -> None:
    straight = steps(dataset, 6, DataPosition())
    for done in range(1, 6):
        resumed = steps(dataset, 6 - done, straight[done - 1].position_after)
        for a, b in zip(straight[done:], resumed, strict=True):
            for name in ("input_ids", "targets", "position_ids"):
                np.testing.assert_array_equal(getattr(a.batch, name), getattr(b.batch, name))
            assert a.position_after == b.position_after


def test_far_position_costs_no_more_than_the_first(dataset: PackedDataset) -> None:
    """Whoever walked there would walk for years."""
    (step,) = steps(dataset, 1, DataPosition(10**15, 9))
    assert step.position_after == DataPosition(10**15 + 1, 3)


def test_same_step_whatever_the_micro_batch(dataset: PackedDataset) -> None:
    orders = [numbers(steps(dataset, 1, DataPosition(), step=4, micro=micro)[0].batch) for micro in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]


def test_data_smaller_than_a_step_are_repeated_within_it(dataset: PackedDataset) -> None:
    (step,) = steps(dataset, 1, DataPosition(0, 7), step=24, micro=8)
    order = numbers(step.batch)
    assert sorted(order[3:13]) == sorted(order[13:23]) == list(range(10))
    assert step.position_after == DataPosition(3, 1)


def test_without_shuffle_every_epoch_has_the_order_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(0, 40, 10)))
    settings = DataSettings(paths=(path,), append_eos=False, shuffle=False)
    plain = open_dataset(settings, sequence_length=2, seed=1, vocab_size=256, cache_dir=tmp_path / "cache")
    assert numbers(steps(plain, 1, DataPosition())[0].batch) == [0, 2, 0, 2]


def test_failure_in_the_background_reaches_the_caller_with_its_cause(dataset: PackedDataset) -> None:
    second_step = dataset.order(0, np.arange(4, 8))
    dataset.plan.pieces.document[second_step] = 99  # a fault that no check foresees
    with BatchLoader(dataset, sequences_per_step=4, micro_batch=2, position=DataPosition()) as loader:
        loader.next()
        for _ in range(2):  # it stays where it failed
            with pytest.raises(BatchError, match=r"the batch at .*sequence=4\) could not be prepared") as caught:
                loader.next()
            assert isinstance(caught.value.__cause__, IndexError)


def test_closing_leaves_no_thread(dataset: PackedDataset) -> None:
    before = set(threading.enumerate())
    steps(dataset, 2, DataPosition())
    assert set(threading.enumerate()) <= before


def test_sizes_and_positions_that_cannot_be_are_refused(dataset: PackedDataset) -> None:
    for step, micro in ((0, 1), (4, 0), (5, 2), (-2, 2)):
        with pytest.raises(DataError, match="must be a positive multiple"):
            steps(dataset, 1, DataPosition(), step=step, micro=micro)
    with pytest.raises(DataError, match="lies outside epochs of 10 sequences"):
        steps(dataset, 1, DataPosition(0, 10))


def test_evaluation_sees_every_sequence_once_in_a_fixed_order(dataset: PackedDataset) -> None:
    batches = list(eval_batches(dataset, 4, 2))
    assert [batch.input_ids.shape[:2] for batch in batches] == [(2, 4), (1, 4)]
    assert sorted(numbers(batches[0]) + numbers(batches[1])[:2]) == list(range(10))
    assert sum(batch.tokens for batch in batches) == dataset.report.tokens == 40
    assert sum(batch.supervised_tokens for batch in batches) == dataset.report.supervised_tokens == 39
    padding = batches[1].targets[0, 2:]
    assert (padding == IGNORED).all()
    assert not batches[1].single_document
    assert batches[0].single_document
    for a, b in zip(batches, eval_batches(dataset, 4, 2), strict=True):
        np.testing.assert_array_equal(a.input_ids, b.input_ids)


def test_tokens_leave_padding_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}\n' * 3)
    settings = DataSettings(paths=(path,))
    rows = open_dataset(settings, sequence_length=16, seed=0, vocab_size=16, cache_dir=tmp_path / "cache")
    batch = train_batch(rows, DataPosition(), 3, 3)
    assert (batch.tokens, batch.supervised_tokens) == (30, 27)


def test_positions_add_up() -> None:
    position = DataPosition()
    for _ in range(7):
        position = advance(position, 5, 3)
    assert position == advance(DataPosition(), 35, 3) == DataPosition(11, 2)
