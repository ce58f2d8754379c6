"""The rows of steps as one Markdown table, each figure with the plan's beside it, and where the plan is off too far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tasks.bench.comparison import DEVICE_PEAK, DEVICE_TAKEN, HOST_HELD, HOST_TAKEN, STEP, Figure
from tasks.bench.roof import RoofReport
from tasks.bench.rows import RowResult
from tasks.bench.step import StepReport
from tiers.quantities import shown_bytes

_COLUMNS = ("", "step", "model TFLOP/s", "of the roof", "stalls a step", "device peak", "device taken", "host")
_MORE = ("host taken", "bytes a parameter", "first step")


def table(results: Sequence[RowResult]) -> str:
    """Rows of steps, or of the roof alone, as `BENCHMARKS.md` has them, and below it what a plan missed.

    In brackets how far the plan's prediction lies above the measurement; bold where that is not within the limits of
    `Figure.violation`.
    """
    columns = (*_COLUMNS, *_MORE)
    lines = [_line(columns), "|" + "---|" * len(columns)]
    notes = []
    for result in results:
        lines.append(_line(_cells(result, len(columns))))
        notes += [f"- {result.row.name}: {note}" for note in _notes(result)]
    return "\n".join(lines + (["", *notes] if notes else []))


def _cells(result: RowResult, count: int) -> list[str]:
    step, roof = result.reports.get("step"), result.reports.get("roof")
    cells = [result.row.name]
    if isinstance(step, StepReport):
        figures = {figure.name: figure for figure in _figures(result)}
        share = f"{step.model_tflops / roof.model_tflops:.1%}" if isinstance(roof, RoofReport) else ""
        stalls = ", ".join(f"{k} {v:.2f} s" for k, v in dataclasses.asdict(step.stalls).items() if v >= 0.005)
        cells += [
            _compared(f"{step.step_s:.3f} s", figures.get(STEP)),
            f"{step.model_tflops:.1f}",
            share,
            stalls or "none",
            _compared(_size(step.gpu_peak_bytes), figures.get(DEVICE_PEAK)),
            _compared(_size(step.device_taken_bytes), figures.get(DEVICE_TAKEN)),
            _compared(_size(step.host_bytes), figures.get(HOST_HELD)),
            _compared(_size(step.host_taken_bytes), figures.get(HOST_TAKEN)),
            f"{step.host_bytes / step.parameters:.2f}",
            f"{step.first_step_s:.0f} s",
        ]
    elif isinstance(roof, RoofReport):
        cells += [f"{roof.step_s:.3f} s", f"{roof.model_tflops:.1f}", "roof"]
    else:
        cells.append("failed")
    return cells + [""] * (count - len(cells))


def _notes(result: RowResult) -> list[str]:
    if result.error is not None:
        return [f"failed: {result.error.splitlines()[0]}"]
    violations = [(figure.name, figure.violation) for figure in _figures(result)]
    return [f"{name}: {violation}" for name, violation in violations if violation is not None]


def _figures(result: RowResult) -> tuple[Figure, ...]:
    plan = result.reports.get("plan")
    return plan if isinstance(plan, tuple) else ()


def _compared(measured: str, figure: Figure | None) -> str:
    if figure is None:
        return measured
    excess = f"plan {figure.excess:+.1%}"
    return f"{measured} ({f'**{excess}**' if figure.violation else excess})"


def _size(num_bytes: int) -> str:
    return shown_bytes(num_bytes) if num_bytes else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
