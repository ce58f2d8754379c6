"""Gaps of the compute lane are blamed on what was at work in them."""

from __future__ import annotations

import pytest

from pipeline.messages import Lane, LaneSpan
from pipeline.stalls import Gap, longest_gaps, stalls_of

HEAD = 9


def span(name: str, lane: Lane, start_s: float, end_s: float) -> LaneSpan:
    return LaneSpan(name, lane, "actor", start_s, end_s)


def test_a_busy_lane_has_no_stall() -> None:
    spans = [span("forward[0]", Lane.COMPUTE, 0.0, 1.0), span("forward[1]", Lane.COMPUTE, 1.0, 2.0)]
    stalls = stalls_of(spans, 0.0, 2.0, HEAD)
    assert stalls.stage == stalls.update == stalls.load == stalls.control == 0.0


def test_a_gap_is_split_between_the_update_the_stage_and_the_rest() -> None:
    spans = [
        span("backward[0]", Lane.COMPUTE, 0.0, 1.0),
        span("update[0]", Lane.UPDATE, 1.5, 2.0),
        span("stage[0]", Lane.H2D, 2.0, 2.25),
        span("forward[0]", Lane.COMPUTE, 2.25, 3.0),
    ]
    stalls = stalls_of(spans, 0.0, 3.0, HEAD)
    assert stalls.stage == pytest.approx(0.25)
    assert stalls.update == pytest.approx(0.5)
    assert stalls.control == pytest.approx(0.5)


@pytest.mark.parametrize("head", ["head", "head wave 2"])
def test_a_head_that_waits_for_its_update_says_so_without_its_layers_number(head: str) -> None:
    spans = [
        span("forward[8]", Lane.COMPUTE, 0.0, 1.0),
        span("update[9]", Lane.UPDATE, 0.5, 2.0),
        span("stage[9]", Lane.H2D, 2.0, 2.25),
        span(head, Lane.COMPUTE, 2.25, 3.0),
    ]
    stalls = stalls_of(spans, 0.0, 3.0, HEAD)
    assert (stalls.update, stalls.stage, stalls.control) == pytest.approx((1.0, 0.25, 0.0))


def test_another_layers_transfer_is_not_blamed() -> None:
    spans = [
        span("forward[1]", Lane.COMPUTE, 0.0, 1.0),
        span("stage[5]", Lane.H2D, 1.0, 2.0),
        span("forward[2]", Lane.COMPUTE, 2.0, 3.0),
    ]
    stalls = stalls_of(spans, 0.0, 3.0, HEAD)
    assert stalls.stage == 0.0
    assert stalls.control == pytest.approx(1.0)


def test_sums_that_a_wave_waits_for_count_as_staging_and_a_recompute_as_work() -> None:
    spans = [
        span("recompute[2]", Lane.COMPUTE, 0.0, 1.0),
        span("fetch_sum[3]", Lane.H2D, 0.5, 2.0),
        span("backward[3]", Lane.COMPUTE, 2.0, 3.0),
    ]
    stalls = stalls_of(spans, 0.0, 3.0, HEAD)
    assert stalls.stage == pytest.approx(1.0) and stalls.control == pytest.approx(0.0)


def test_weights_that_came_late_from_the_drive_are_a_load_stall() -> None:
    spans = [
        span("forward[1]", Lane.COMPUTE, 0.0, 1.0),
        span("load_weights[2]", Lane.NVME_READ, 0.5, 3.0),
        span("stage[2]", Lane.H2D, 3.0, 3.5),
        span("forward[2]", Lane.COMPUTE, 3.5, 4.0),
    ]
    stalls = stalls_of(spans, 0.0, 4.0, HEAD)
    assert stalls.load == pytest.approx(2.0)
    assert stalls.stage == pytest.approx(0.5)


def test_an_update_that_waited_for_the_drive_is_a_load_stall_also_while_its_slot_was_taken() -> None:
    spans = [
        span("backward[0]", Lane.COMPUTE, 0.0, 1.0),
        span("store_state[3]", Lane.NVME_WRITE, 1.0, 2.0),
        span("load_state[4]", Lane.NVME_READ, 2.0, 4.0),
        span("update[4]", Lane.UPDATE, 4.0, 4.5),
        span("stage[4]", Lane.H2D, 4.5, 4.75),
        span("forward[4]", Lane.COMPUTE, 4.75, 5.0),
    ]
    stalls = stalls_of(spans, 0.0, 5.0, HEAD)
    assert (stalls.load, stalls.update, stalls.stage, stalls.control) == pytest.approx((3.0, 0.5, 0.25, 0.0))


def test_gaps_between_the_same_operations_of_every_step_are_one_and_the_longest_come_first() -> None:
    spans = [
        span(name, Lane.COMPUTE, step + start_s, step + end_s)
        for step in (0.0, 8.0)
        for name, start_s, end_s in (("forward[0]", 0.0, 1.0), ("head", 1.5, 3.0), ("backward[0]", 3.0, 4.0))
    ]
    spans.append(span("stage[0]", Lane.H2D, 1.0, 1.5))
    assert longest_gaps(spans, 0.0, 16.0, count=9) == (
        Gap("backward[0]", "forward[0]", 4.0),
        Gap("forward[0]", "head", 1.0),
    )
    assert longest_gaps(spans, 0.0, 16.0, count=1) == (Gap("backward[0]", "forward[0]", 4.0),)
    assert longest_gaps(spans, 0.0, 8.0, count=9)[0] == Gap("backward[0]", "forward[0]", 4.0)
