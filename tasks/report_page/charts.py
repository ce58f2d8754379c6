"""The charts of a page as data: which series of a run stand together, thinned out and rounded for a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from pipeline.messages import LaneSpan
from tasks.report_page.run_record import STALL, RunRecord
from tasks.report_page.step_lanes import StepLanes
from tasks.report_page.thinning import bucket_ends, even_rows, smoothed, thinned

DIGITS = 6
"""Significant ones of a number in the page: a screen shows fewer."""

MAX_MARKS = 400
MAX_SPANS = 8000
"""Operations of a step that are drawn; 80 layers have about a thousand."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or a layer of a stack."""

    name: str
    colour: int
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart over the steps."""

    id: str
    title: str
    format: str
    """How values are written: plain, count, bytes or seconds."""
    series: list[Series]
    points: list[tuple[int, float]] = field(default_factory=list)
    """Single values: the held-out loss."""
    marked: list[int] = field(default_factory=list)
    """Steps with a mark at the axis: skipped ones."""
    log: bool = False
    """Logarithmic where the values span much."""
    zero: bool = False
    """Begins at zero."""
    stacked: bool = False


class ChartMaker:
    """Makes charts of one run: all of them over the same steps."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._ends = bucket_ends(len(record.steps))
        self.steps = [record.steps[end - 1] for end in self._ends]
        """The last step of each point."""

    def charts(self) -> list[Chart]:
        """Every chart that the run has values for, in the order of the page."""
        record = self._record
        loss = record.column("loss")
        held_out = [(step, _rounded(value)) for step, value in record.evaluations if math.isfinite(value)]
        marked = [record.skipped[place][0] for place in even_rows(len(record.skipped), MAX_MARKS)]
        found = [
            Chart(
                "loss",
                "Loss",
                "plain",
                [self._series("each step", 0, loss, thin=True), self._series("smoothed", 0, smoothed(loss))],
                [(step, value) for step, value in held_out if value is not None],
                marked,
            ),
            Chart("speed", "Tokens per second", "count", [self._named("tokens/s", 2, "tokens_per_s")], zero=True),
            Chart(
                "stalls",
                "Stalls of the device, by cause",
                "seconds",
                [
                    self._named(f"{cause}", colour, STALL + cause)
                    for colour, cause in enumerate(record.stall_causes)
                    if colour < 7
                ],
                stacked=True,
            ),
            Chart("lr", "Learning rate", "plain", [self._named("learning rate", 4, "lr")], zero=True),
            Chart("norm", "Gradient norm", "plain", [self._named("norm", 3, "grad_norm")], log=True, zero=True),
            Chart("time", "Seconds a step", "seconds", [self._named("step", 6, "step_s")], log=True, zero=True),
            Chart(
                "memory",
                "Memory held",
                "bytes",
                [self._named("host", 0, "host_bytes"), self._named("device, peak", 1, "gpu_peak_bytes")],
                zero=True,
            ),
            Chart(
                "nvme",
                "NVMe traffic a step",
                "bytes",
                [self._named("read", 2, "nvme_read_bytes"), self._named("written", 3, "nvme_write_bytes")],
                zero=True,
            ),
        ]
        kept = [_without_empty(chart) for chart in found]
        return [chart for chart in kept if chart.series or chart.points]

    def _named(self, name: str, colour: int, column: str) -> Series:
        return self._series(name, colour, self._record.column(column))

    def _series(self, name: str, colour: int, values: Sequence[float], *, thin: bool = False) -> Series:
        buckets = thinned(values, self._ends)
        return Series(
            name,
            colour,
            [_rounded(bucket.mean) for bucket in buckets],
            [_rounded(bucket.low) for bucket in buckets],
            [_rounded(bucket.high) for bucket in buckets],
            thin,
        )


def page_data(steps: list[int], charts: list[Chart], lanes: StepLanes | None) -> dict[str, object]:
    """What the page's script reads: `steps`, `charts` as `Chart`, and `step` with seconds from its beginning."""
    return {
        "steps": steps,
        "charts": [asdict(chart) for chart in charts],
        "step": None if lanes is None else _step_data(lanes),
    }


def _step_data(lanes: StepLanes) -> dict[str, object]:
    room = MAX_SPANS
    shown = []
    for lane in lanes.lanes:
        rows = []
        for row in lane.rows:
            rows.append([_span_data(span, lanes.start_s) for span in row[: max(0, room)]])
            room -= len(row)
        shown.append({"title": lane.title, "busy": lane.busy, "rows": rows})
    return {"number": lanes.step, "length_s": lanes.length_s, "lanes": shown}


def _span_data(span: LaneSpan, from_s: float) -> tuple[str, float | None, float | None, int]:
    return span.name, _rounded(span.start_s - from_s), _rounded(span.end_s - from_s), span.num_bytes


def _without_empty(chart: Chart) -> Chart:
    """The chart without series that have no value, or nothing but zero where zero means that the machine has none."""
    optional = chart.format == "bytes"
    series = [one for one in chart.series if any(value is not None and (value or not optional) for value in one.high)]
    return Chart(**{name: getattr(chart, name) for name in Chart.__slots__} | {"series": series})


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
