"""Why and where the compute lane stood idle in a step: a pure reading of the spans that the lanes recorded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipeline.messages import Lane, LaneSpan

NOISE_S = 1e-4
"""Gaps below this are the time between two calls, not a stall."""

_LAYER = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds that the compute lane waited, by cause."""

    load: float = 0.0
    """For weights or optimizer state to come from NVMe, or to make room there is too little of for what comes next."""
    stage: float = 0.0
    """For weights, or gradient sums of the wave before, to come to the device."""
    update: float = 0.0
    """For the optimizer to finish the layer that comes next."""
    control: float = 0.0
    """For nothing that a lane did: calls on their way, the driver, the first compilation."""


def stalls_of(spans: Iterable[LaneSpan], start_s: float, end_s: float, head: int) -> Stalls:
    """Attribute every gap of the compute lane between two times.

    A gap before an operation that reads layer l is split at the moments when `stage[l]` began, and before that when
    `update[l]` or `load_weights[l]` ended: what was at work in each part of the gap is its cause. Where `load_state[l]`
    came in the gap, all before `update[l]` is its: had there been a free slot, it would have come earlier.

    Args:
        spans: Of any lanes; those outside the window are ignored.
        start_s: Begin of the window, `time.monotonic()`.
        end_s: Its end.
        head: Index of the head layer, which the compute lane's spans do not name.
    """
    spans = sorted(spans, key=_start)
    compute = _computing(spans, start_s, end_s)
    causes = {"load": 0.0, "stage": 0.0, "update": 0.0, "control": 0.0}
    idle_from = start_s
    for span in compute:
        if span.start_s - idle_from > NOISE_S:
            for cause, seconds in _split(spans, span, _layer(span, head), idle_from):
                causes[cause] += seconds
        idle_from = max(idle_from, span.end_s)
    return Stalls(**causes)


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two operations that follow each other on the compute lane."""

    before: str
    after: str
    seconds: float
    """All of them together."""


def longest_gaps(spans: Iterable[LaneSpan], start_s: float, end_s: float, count: int) -> tuple[Gap, ...]:
    """Where between two times the compute lane waited longest, the same pair of operations of every step together."""
    compute = _computing(sorted(spans, key=_start), start_s, end_s)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for before, after in pairwise(compute):
        seconds[before.name, after.name] += max(0.0, after.start_s - before.end_s)
    gaps = (Gap(*names, total) for names, total in seconds.items() if total > 0.0)
    return tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:count])


def _computing(spans: Iterable[LaneSpan], start_s: float, end_s: float) -> list[LaneSpan]:
    """Those of the compute lane that begin between two times."""
    return [span for span in spans if span.lane is Lane.COMPUTE and start_s <= span.start_s <= end_s]


def _start(span: LaneSpan) -> float:
    return span.start_s


def _layer(span: LaneSpan, head: int) -> int:
    """That an operation of the compute lane reads."""
    match = _LAYER.search(span.name)
    return int(match.group(1)) if match is not None else head


def _split(spans: list[LaneSpan], late: LaneSpan, layer: int, idle_from: float) -> list[tuple[str, float]]:
    """Parts of the gap before `late`, latest first."""
    parts: list[tuple[str, float]] = []
    until = late.start_s
    for cause, names, lane in (
        ("stage", {"stage", "fetch_sum"}, Lane.H2D),
        ("load", {"load_weights"}, Lane.NVME_READ),
        ("update", {"update"}, Lane.UPDATE),
        ("load", {"load_state"}, Lane.NVME_READ),
    ):
        wanted = {f"{name}[{layer}]" for name in names}
        before = [s for s in spans if s.lane is lane and s.name in wanted and idle_from < s.end_s <= until + NOISE_S]
        if before:
            begun = max(min(s.start_s for s in before), idle_from)
            if "load_state" in names:
                begun = idle_from
            parts.append((cause, max(0.0, until - begun)))
            until = begun
    parts.append(("control", max(0.0, until - idle_from)))
    return parts
