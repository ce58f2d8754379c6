"""Several rows of a table in one command, each on its own: what one of them does, no other feels.

A row is a recipe and settings. Its result is written as soon as it is known, so that a time limit cuts rows short that
were not measured yet and loses none that were.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Row:
    """What is to be measured."""

    recipe: Path
    overrides: tuple[str, ...]
    name: str
    """Of the recipe's file, and what sets the row apart from others of it."""


@dataclass(frozen=True)
class RowResult:
    """What became of a row."""

    row: Row
    seconds: float
    """Its start included."""
    reports: Mapping[str, object]
    """Dataclasses or tuples of them, by kind; empty where it failed."""
    error: str | None = None

    def as_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "row": self.row.name,
                "recipe": str(self.row.recipe),
                "overrides": self.row.overrides,
                "seconds": self.seconds,
                "error": self.error,
                **{name: plain(report) for name, report in self.reports.items()},
            }
        )


def rows_of(recipes: Sequence[Path], overrides: Sequence[str], sweeps: Sequence[str]) -> tuple[Row, ...]:
    """Every recipe with every mixture of the swept values.

    Args:
        recipes: TOML files.
        overrides: `section.key=value`, for all rows.
        sweeps: `section.key=value,value,...` each.

    Raises:
        ValueError: A sweep has another form.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not (key.strip() and equals and values.strip()):
            raise ValueError(f"--sweep {sweep}: must have the form section.key=value,value,...")
        axes.append([f"{key.strip()}={value.strip()}" for value in values.split(",")])
    return tuple(
        Row(recipe, (*overrides, *mixture), " ".join((recipe.stem, *mixture)))
        for recipe in recipes
        for mixture in itertools.product(*axes)
    )


def run_rows(
    rows: Sequence[Row],
    measure: Callable[[Row], Mapping[str, object]],
    *,
    out: Path | None,
    say: Callable[[str], None],
    until_s: float = math.inf,
) -> tuple[RowResult, ...]:
    """Measure rows one after another; one that fails is reported and the next one begins.

    Args:
        rows: In this order.
        measure: Returns the reports of a row.
        out: File that gets a line of JSON a row, as soon as it is known; begun anew.
        say: Told how it goes.
        until_s: `time.monotonic()` after which no row begins, nor where the longest so far would end later.

    Raises:
        OSError: The file cannot be written.
    """
    with nullcontext() if out is None else out.open("w") as file:
        return _run_rows(rows, measure, file, say, until_s)


def _run_rows(
    rows: Sequence[Row],
    measure: Callable[[Row], Mapping[str, object]],
    file: TextIO | None,
    say: Callable[[str], None],
    until_s: float,
) -> tuple[RowResult, ...]:
    results: list[RowResult] = []
    for number, row in enumerate(rows, 1):
        began_s = time.monotonic()
        longest_s = max((result.seconds for result in results), default=0.0)
        if began_s + longest_s > until_s:
            say(f"{row.name}: left out, {max(0.0, until_s - began_s):.0f} s are left and a row took {longest_s:.0f} s")
            continue
        say(f"row {number} of {len(rows)}: {row.name}")
        try:
            reports, error = measure(row), None
        except Exception as failure:  # whatever it is, the other rows are asked for too
            reports, error = {}, f"{type(failure).__name__}: {failure}"
            say(f"{row.name}: failed: {error}")
        results.append(RowResult(row, time.monotonic() - began_s, reports, error))
        if file is not None:
            _append(file, results[-1].as_json())
    return tuple(results)


def plain(report: object) -> object:
    """Values that JSON has."""
    if isinstance(report, tuple):
        return [plain(each) for each in report]
    instance: Any = report
    return dataclasses.asdict(instance)


def _append(file: TextIO, line: str) -> None:
    file.write(line + "\n")
    file.flush()
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # pipes and devices know no fsync
        os.fsync(file.fileno())
