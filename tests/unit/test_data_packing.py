"""Every token of every document stands in exactly one sequence, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.epoch_order import permuted
from tasks.data.packing import cut_documents, pack


def fill_levels(lengths: list[int], sequence_length: int, **options: bool) -> list[int]:
    pieces = cut_documents(np.array(lengths, dtype=np.int64), sequence_length, "split")
    plan = pack(pieces, sequence_length, seed=1, shuffle=options.get("shuffle", True))
    sums = np.concatenate([[0], np.cumsum(plan.pieces.length)])
    return [int(level) for level in sums[plan.first[1:]] - sums[plan.first[:-1]]]


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=60),
    sequence_length=st.integers(2, 33),
    shuffle=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_split_places_every_token_once(lengths: list[int], sequence_length: int, shuffle: bool) -> None:
    pieces = cut_documents(np.array(lengths, dtype=np.int64), sequence_length, "split")
    plan = pack(pieces, sequence_length, shuffle=shuffle, seed=3)
    placed = sorted(
        (int(d), int(o) + i)
        for d, o, n in zip(plan.pieces.document, plan.pieces.offset, plan.pieces.length, strict=True)
        for i in range(n)
    )
    assert placed == [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    levels = np.add.reduceat(plan.pieces.length, plan.first[:-1])
    assert plan.first[-1] == len(plan.pieces.length)
    assert levels.max() <= sequence_length
    # Best fit never leaves two sequences that would have gone into one.
    smallest = np.sort(levels)[:2]
    assert len(levels) == 1 or smallest.sum() > sequence_length


@pytest.mark.parametrize(
    ("length", "pieces"), [(60, [60]), (61, [60, 1]), (120, [60, 60]), (121, [60, 60, 1]), (1, [1])]
)
def test_long_document_is_split_truncated_or_dropped(length: int, pieces: list[int]) -> None:
    lengths = np.array([length], dtype=np.int64)
    assert cut_documents(lengths, 60, "split").length.tolist() == pieces
    assert cut_documents(lengths, 60, "truncate").length.tolist() == pieces[:1]
    assert cut_documents(lengths, 60, "drop").length.tolist() == (pieces if len(pieces) == 1 else [])


def test_documents_that_fit_together_share_a_sequence() -> None:
    assert sorted(fill_levels([30, 50, 10, 20, 10], 60)) == [60, 60]
    assert fill_levels([30, 50, 10, 20, 10], 60, shuffle=False) == [60, 60]


def test_order_of_the_data_is_kept_without_shuffle() -> None:
    pieces = cut_documents(np.array([40, 40, 40, 15], dtype=np.int64), 60, "split")
    plan = pack(pieces, 60, shuffle=False, seed=0)
    assert plan.pieces.document[plan.first[:-1]].tolist() == [0, 1, 2]


def test_packing_follows_the_seed() -> None:
    pieces = cut_documents(np.full(50, 7, dtype=np.int64), 21, "split")
    plans = [pack(pieces, 21, shuffle=True, seed=seed).pieces.document.tolist() for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_permuted_is_a_permutation_and_may_be_asked_piecewise(size: int, seed: int, stream: int) -> None:
    whole = permuted(np.arange(size), size, seed=seed, stream=stream)
    assert sorted(whole.tolist()) == list(range(size))
    assert permuted(np.array([size // 2]), size, seed=seed, stream=stream)[0] == whole[size // 2]


def test_permutations_look_random() -> None:
    first_places = np.array([permuted(np.arange(10), 10, seed=5, stream=epoch) for epoch in range(2000)])
    counts = np.array([np.bincount(column, minlength=10) for column in first_places.T])
    # 200 expected in each cell, standard deviation 13.4; 5 of them.
    assert abs(counts - 200).max() < 67


def test_permutations_never_change_between_versions() -> None:
    # A resumed run must see the order it began with: these numbers are a promise.
    assert permuted(np.arange(10), 10, seed=17, stream=0).tolist() == [0, 5, 7, 3, 4, 1, 8, 9, 6, 2]
    assert permuted(np.arange(10), 10, seed=17, stream=1).tolist() == [1, 8, 0, 9, 5, 2, 6, 4, 3, 7]
