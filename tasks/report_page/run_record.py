"""Reads what a run recorded about its steps, of any length, whole or cut short by a kill."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiers.parsing import parse_json

METRICS, EVALUATIONS, EVENTS, RECIPE = "metrics.jsonl", "evaluation.jsonl", "events.jsonl", "recipe.toml"

COLUMNS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "step_s",
    "tokens_per_s",
    "model_tflops",
    "gpu_peak_bytes",
    "host_bytes",
    "nvme_read_bytes",
    "nvme_write_bytes",
)
"""Fields of a metrics row that are kept; causes of stalls come beside them as `stall_s.CAUSE`."""

STALL = "stall_s."

STEP_DIGITS = rb"(\d{1,15})"
"""Of a step in a row; what has more is damage, and may be more than can be counted or drawn."""
_STEP = re.compile(rb'\{"step": ' + STEP_DIGITS + rb",")
_STEPS = range(10**15)
_LARGEST = 1e100
"""Of a value in a row: fp32 ends far below, and sums of what is larger may end beyond fp64."""


class ReportError(ValueError):
    """What was asked for cannot be reported; nothing was written."""


@dataclass
class RunRecord:
    """A run's rows as columns: a float a step and field, NaN where there was no finite number."""

    name: str
    directory: Path
    recipe_toml: str | None
    """As the run directory has it; None where it is missing."""
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Steps that were not applied, and why."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss on held-out data."""
    unreadable_lines: int = 0
    """Lines that are no row: what a kill left of the last one, or damage."""

    def column(self, name: str) -> list[float]:
        """A field over the steps; all NaN where no row has it."""
        return self.columns.get(name, [math.nan] * len(self.steps))

    @property
    def stall_causes(self) -> tuple[str, ...]:
        """Causes of stalls that rows name, in their order."""
        return tuple(name.removeprefix(STALL) for name in self.columns if name.startswith(STALL))


def read_run(directory: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        ReportError: It is none.
        OSError: A file of it cannot be read.
    """
    if not directory.is_dir():
        raise ReportError(f"{directory} is no directory; give the run directory of a recipe (run.dir)")
    if not any((directory / name).exists() for name in (METRICS, EVENTS, RECIPE)):
        raise ReportError(
            f"{directory} is no run directory: it has none of {METRICS}, {EVENTS} and {RECIPE}; "
            "give the directory that the recipe names as run.dir"
        )
    recipe = directory / RECIPE
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else None
    record = RunRecord(directory.absolute().name, directory.absolute(), text)
    for row in rows_of(directory / METRICS, record):
        _add(record, row)
    losses: dict[int, float] = {}
    for row in rows_of(directory / EVALUATIONS, record):
        losses[row["step"]] = finite(row.get("loss"))
    record.evaluations = sorted(losses.items())
    return record


def rows_of(path: Path, record: RunRecord, around: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a file that is missing has none. Other lines are counted in `record`.

    Args:
        path: Of JSON objects, one a line.
        record: Of the run.
        around: First and last step that are wanted; rows of others are not parsed.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if around is not None and (match := _STEP.match(line)) and not around[0] <= int(match[1]) <= around[1]:
                continue
            try:
                row = parse_json(line)
                valid = type(row["step"]) is int and row["step"] in _STEPS
            except (ValueError, KeyError, TypeError):
                valid = False
            if valid:
                yield row
            else:
                record.unreadable_lines += 1


def _add(record: RunRecord, row: dict[str, Any]) -> None:
    """Append a row. One that goes back replaces what follows it: the run was resumed before it."""
    step = row["step"]
    if record.steps and step <= record.steps[-1]:
        place = bisect_left(record.steps, step)
        del record.steps[place:]
        for column in record.columns.values():
            del column[place:]
        record.skipped = [(at, why) for at, why in record.skipped if at < step]
    values = {name: finite(row.get(name)) for name in COLUMNS}
    stalls = row.get("stall_s")
    if isinstance(stalls, dict):
        values |= {STALL + cause: finite(seconds) for cause, seconds in stalls.items()}
    for name in values.keys() - record.columns.keys():
        record.columns[name] = []
    # Causes keep the order in which rows name them.
    record.columns = {name: record.columns[name] for name in [*values, *(record.columns.keys() - values.keys())]}
    for name, column in record.columns.items():
        # A field that earlier rows did not have yet, or this one has not.
        column += [math.nan] * (len(record.steps) - len(column))
        column.append(values.get(name, math.nan))
    record.steps.append(step)
    if row.get("skipped"):
        record.skipped.append((step, str(row.get("skip_reason") or "not applied")))


def finite(value: object) -> float:
    """A number that can be computed with; NaN for null and anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return math.nan
    return float(value)
