"""What the lanes of one step did and when: a pure reading of the spans in events.jsonl.

Two steps are in flight, so the spans of a step are not those that were collected with it. A step is shown as the time
from the end of the backward pass before it to the end of its own: with clipping, its beginning has the updates of the
step before, just as its own fall into the next one. Shares of this window are those of the steady state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.lanes import busy_shares
from pipeline.messages import Lane, LaneSpan

TITLES = {
    Lane.NVME_READ: "NVMe read",
    Lane.H2D: "host to device",
    Lane.COMPUTE: "compute",
    Lane.D2H: "device to host",
    Lane.UPDATE: "update",
    Lane.NVME_WRITE: "NVMe write",
}
"""In the order in which a layer's bytes pass through the lanes."""


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A row of events.jsonl."""

    step: int
    """At whose end the span was collected."""
    span: LaneSpan


@dataclass(frozen=True, slots=True)
class LaneRows:
    """A lane during a window."""

    title: str
    rows: tuple[tuple[LaneSpan, ...], ...]
    """Spans that overlap lie in different rows; each row is in order."""
    busy: float
    """Share of the window in which at least one span was at work."""
    num_bytes: int
    """Of spans that ended in the window."""


@dataclass(frozen=True, slots=True)
class StepLanes:
    """All lanes of one step."""

    step: int
    start_s: float
    end_s: float
    lanes: tuple[LaneRows, ...]

    @property
    def length_s(self) -> float:
        """Seconds from the end of the backward pass before to the end of this one."""
        return self.end_s - self.start_s


def window_of(collected: Sequence[CollectedSpan], step: int) -> tuple[float, float] | None:
    """When the step began and ended; None where its backward pass was not recorded.

    Args:
        collected: With the step and with the steps around it.
        step: Its number.
    """
    compute = sorted((c for c in collected if c.span.lane is Lane.COMPUTE), key=lambda c: c.span.start_s)
    backward = [c.span for c in compute if c.step == step and c.span.name.startswith("backward")]
    if not backward:
        return None
    spans = [c.span for c in compute]
    forward = [span for span in spans if span.name == "forward[0]" and span.start_s <= backward[0].start_s]
    first_s = forward[-1].start_s if forward else backward[0].start_s
    # An evaluation between two steps belongs to neither.
    before = [s.end_s for s in spans if s.name.startswith(("backward", "evaluate")) and s.end_s <= first_s]
    staged = [c.span.start_s for c in collected if c.span.name == "stage[0]" and c.span.end_s <= first_s]
    return (before[-1] if before else max(staged, default=first_s)), backward[-1].end_s


def lanes_of(spans: Iterable[LaneSpan], step: int, start_s: float, end_s: float) -> StepLanes:
    """Lay out what was at work between two times; each optimizer actor has a lane of its own."""
    held: dict[tuple[Lane, str], list[LaneSpan]] = {}
    for span in spans:
        if span.end_s > start_s and span.start_s < end_s:
            held.setdefault((span.lane, span.actor if span.lane is Lane.UPDATE else ""), []).append(span)
    order = list(TITLES)
    lanes = []
    for (lane, actor), found in sorted(held.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        title = f"{TITLES[lane]}, {actor}" if actor else TITLES[lane]
        num_bytes = sum(span.num_bytes for span in found if span.end_s <= end_s)
        lanes.append(LaneRows(title, packed(found), busy_shares(found, start_s, end_s).get(lane, 0.0), num_bytes))
    return StepLanes(step, start_s, end_s, tuple(lanes))


def packed(spans: Iterable[LaneSpan]) -> tuple[tuple[LaneSpan, ...], ...]:
    """Put spans into as few rows as they need so that none overlaps another of its row."""
    rows: list[list[LaneSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return tuple(map(tuple, rows))
