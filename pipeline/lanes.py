"""How busy each lane was: a pure reading of recorded spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pipeline.messages import Lane, LaneSpan


def busy_shares(spans: Iterable[LaneSpan], start_s: float, end_s: float) -> dict[Lane, float]:
    """Share of a window in which each lane was at work.

    A lane that several actors have (the optimizers) counts with their mean; operations of one actor that overlap (disk
    requests) count once.

    Args:
        spans: Of any lanes, in any order.
        start_s: Begin of the window, `time.monotonic()`.
        end_s: Its end, later than `start_s`.
    """
    intervals: dict[Lane, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        start, end = max(span.start_s, start_s), min(span.end_s, end_s)
        if end > start:
            intervals[span.lane][span.actor].append((start, end))
    window_s = end_s - start_s
    return {lane: sum(map(_covered, of.values())) / len(of) / window_s for lane, of in intervals.items()}


def any_busy_s(spans: Iterable[LaneSpan], start_s: float, end_s: float) -> float:
    """Seconds of a window in which at least one lane of any actor was at work."""
    within = ((max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans)
    return _covered([(start, end) for start, end in within if end > start])


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
