"""Ways to make activations fit the device: which are worth trying. Which is chosen: `test_placement_choice`."""

from __future__ import annotations

import pytest

from pipeline.memory.boundary_plans import BoundaryPlan, boundary_plans
from pipeline.memory.device_ways import chunk_sizes, worth_trying


def test_ways_that_do_more_than_one_that_needs_no_spilling_are_left_out() -> None:
    spilled = {(1, 1): 5, (2, 1): 2, (3, 1): 0, (1, 2): None}
    tried = worth_trying(boundary_plans(24, 2), (0,), lambda way: spilled.get(way.boundaries, 1))
    assert [way.boundaries for way in tried] == [(1, 1), (2, 1), (3, 1), (2, 2)]


def test_sizes_of_chunks_are_smaller_than_what_passes_whole_and_a_fixed_one_is_kept() -> None:
    assert chunk_sizes(8192, None) == (0, 4096, 2048)
    assert chunk_sizes(2048, None) == (0,), "no smaller chunk is worth it"
    assert chunk_sizes(8192, 3000) == (3000,)
    assert chunk_sizes(8192, 0) == (0,)


@pytest.mark.parametrize(
    ("spilled", "tried"),
    [
        ({0: 0}, [0]),
        ({0: 3, 16384: 0}, [0, 16384]),
        ({0: 28, 16384: 24, 8192: 24, 4096: 16, 2048: 15}, [0, 16384, 4096, 2048]),
        ({0: 5, 16384: 6, 8192: 6, 4096: 6, 2048: 4}, [0, 2048]),
        ({0: None, 16384: None, 8192: 28, 4096: 20, 2048: 20}, [8192, 4096]),
        ({0: None, 16384: None, 8192: None, 4096: None, 2048: None}, []),
    ],
    ids=[
        "all fits whole",
        "all helps alike",
        "more and more",
        "only the smallest helps",
        "whole has no room",
        "none has",
    ],
)
def test_whole_micro_batches_come_first_and_smaller_chunks_only_where_they_let_more_stay(
    spilled: dict[int, int | None], tried: list[int]
) -> None:
    ways = worth_trying([BoundaryPlan()], chunk_sizes(1 << 17, None), lambda way: spilled[way.chunk_tokens])
    assert [way.chunk_tokens for way in ways] == tried


def test_what_fits_in_chunks_alone_does_not_rule_out_thinner_boundaries_whole() -> None:
    plans = [BoundaryPlan(1), BoundaryPlan(2)]
    spilled = {(1, 0): 4, (1, 4096): 0, (2, 0): 1, (2, 4096): 0}
    ways = worth_trying(plans, (0, 4096), lambda way: spilled[way.boundaries.every, way.chunk_tokens])
    assert [(way.boundaries.every, way.chunk_tokens) for way in ways] == [(1, 0), (1, 4096), (2, 0)]
