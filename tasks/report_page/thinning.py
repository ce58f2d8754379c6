"""Thins out long series to what a screen can show, so that a spike of one step among a million stays in sight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 1500
"""Twice the pixels of a wide chart, and less than 2 MB of page for every series together."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring values as one point; None where none of them was finite."""

    mean: float | None
    low: float | None
    high: float | None


def bucket_ends(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Ends (exclusive) of at most `limit` runs of near equal length that `count` values fall into, in order."""
    buckets = min(count, limit)
    return [(number + 1) * count // buckets for number in range(buckets)]


def thinned(values: Sequence[float], ends: Sequence[int]) -> list[Bucket]:
    """Mean, lowest and highest finite value of each run.

    Args:
        values: NaN where there is none.
        ends: From `bucket_ends(len(values))`.
    """
    buckets = []
    start = 0
    for end in ends:
        finite = [value for value in values[start:end] if math.isfinite(value)]
        start = end
        if finite:
            buckets.append(Bucket(math.fsum(finite) / len(finite), min(finite), max(finite)))
        else:
            buckets.append(Bucket(None, None, None))
    return buckets


def smoothed(values: Sequence[float], share: float = 0.005) -> list[float]:
    """An exponential moving average over about `share` of the series, without the pull of its beginning.

    What is not finite is passed over: the average stays as it was.
    """
    decay = 1.0 - 1.0 / max(1.0, share * len(values))
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1.0
        averages.append(total / weight if weight else math.nan)
    return averages


def median(values: Sequence[float]) -> float:
    """The middle finite value, NaN where there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.nan


def even_rows(count: int, limit: int) -> list[int]:
    """At most `limit` of the indices below `count`, evenly spread, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [number * (count - 1) // (limit - 1) for number in range(limit)]
