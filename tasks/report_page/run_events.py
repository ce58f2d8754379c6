"""Reads events.jsonl, which may have half a million lines: which steps it has, and the spans of one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pipeline.messages import Lane, LaneSpan
from tasks.report_page.run_record import EVENTS, STEP_DIGITS, ReportError, RunRecord, finite, rows_of
from tasks.report_page.step_lanes import CollectedSpan, StepLanes, lanes_of, window_of
from tasks.report_page.thinning import median

_BACKWARD = re.compile(rb'\{"step": ' + STEP_DIGITS + rb', "name": "backward\[')


@dataclass
class EventIndex:
    """What a look at every line's beginning tells."""

    steps: set[int] = field(default_factory=set)
    """With a backward pass: those that can be shown."""


def index_events(record: RunRecord) -> EventIndex:
    """Look through the file; a file that is missing has nothing."""
    index = EventIndex()
    path = record.directory / EVENTS
    if not path.exists():
        return index
    with path.open("rb") as file:
        for line in file:
            match = _BACKWARD.match(line)
            if match is not None:
                index.steps.add(int(match[1]))
    return index


def read_step(record: RunRecord, index: EventIndex, wanted: int | None) -> StepLanes | None:
    """Lay out the lanes of a step.

    Args:
        record: The run.
        index: Of its events.
        wanted: Number of the step; None takes one of median length.

    Returns:
        None where no step was asked for and none was recorded.

    Raises:
        ReportError: The step was not recorded.
    """
    if wanted is not None and wanted not in index.steps:
        have = f"steps {min(index.steps)} to {max(index.steps)}" if index.steps else "no step"
        raise ReportError(
            f"{record.directory / EVENTS} has no spans of step {wanted}, it has {have}; choose another --step "
            "(log.events_max_mib ends the recording)"
        )
    step = wanted if wanted is not None else typical_step(record, index.steps)
    if step is None:
        return None
    # Updates are collected a step later, and a slow driver collects later still.
    near = [
        collected
        for row in rows_of(record.directory / EVENTS, record, around=(step - 1, step + 3))
        if (collected := _collected(row)) is not None
    ]
    window = window_of(near, step)
    return lanes_of([collected.span for collected in near], step, *window) if window is not None else None


def typical_step(record: RunRecord, recorded: set[int]) -> int | None:
    """The latest recorded step whose time is nearest to the median; the first has no step before it to start from."""
    times = dict(zip(record.steps, record.column("step_s"), strict=True))
    shown = [step for step in recorded if step - 1 in recorded] or list(recorded)
    middle = median([times[step] for step in shown if step in times])
    measured = [step for step in shown if times.get(step) == times.get(step)]
    if middle != middle or not measured:
        return max(shown, default=None)
    return min(measured, key=lambda step: (abs(times.get(step, float("inf")) - middle), -step))


def _collected(row: dict[str, Any]) -> CollectedSpan | None:
    """The span of a row; None for a row of another version, or a damaged one."""
    start_s, end_s, num_bytes = (finite(row.get(name, 0)) for name in ("start_s", "end_s", "num_bytes"))
    if not start_s <= end_s or not num_bytes >= 0:
        return None
    try:
        span = LaneSpan(str(row["name"]), Lane(row["lane"]), str(row["actor"]), start_s, end_s, int(num_bytes))
    except (KeyError, ValueError):
        return None
    return CollectedSpan(row["step"], span)
