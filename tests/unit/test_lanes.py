"""Busy shares: overlaps count once, several actors of a lane with their mean, the window cuts."""

from __future__ import annotations

import pytest

from pipeline.lanes import busy_shares
from pipeline.messages import Lane, LaneSpan


def test_overlapping_operations_of_an_actor_count_once_and_the_window_cuts() -> None:
    spans = [
        LaneSpan("a", Lane.NVME_READ, "prefetcher", -1.0, 2.0),
        LaneSpan("b", Lane.NVME_READ, "prefetcher", 1.0, 3.0),
        LaneSpan("c", Lane.COMPUTE, "compute", 9.0, 12.0),
    ]
    shares = busy_shares(spans, 0.0, 10.0)
    assert shares == {Lane.NVME_READ: pytest.approx(0.3), Lane.COMPUTE: pytest.approx(0.1)}


def test_a_lane_of_several_actors_counts_with_their_mean() -> None:
    spans = [LaneSpan("u", Lane.UPDATE, f"optimizer-{part}", 0.0, part + 1.0) for part in range(2)]
    assert busy_shares(spans, 0.0, 4.0)[Lane.UPDATE] == pytest.approx(1.5 / 4)
