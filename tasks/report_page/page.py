"""Writes the page: one HTML file that loads nothing, runs one script that its policy names, and needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tasks.memory_account import MemoryAccount
from tasks.report_page.charts import MAX_SPANS, Chart, ChartMaker, page_data
from tasks.report_page.run_record import RunRecord
from tasks.report_page.step_lanes import StepLanes
from tasks.report_page.tables import (
    account_table,
    evaluations_table,
    lanes_table,
    number,
    operations_table,
    steps_table,
)
from tasks.report_page.thinning import median
from tiers.quantities import shown_bytes, shown_count, shown_duration

_HERE = Path(__file__).parent


def page(record: RunRecord, lanes: StepLanes | None, account: MemoryAccount | str) -> str:
    """The page of a run.

    Args:
        record: Its rows.
        lanes: Of the step to show; None where no step was recorded.
        account: Where every byte lives, or why that is not known.
    """
    maker = ChartMaker(record)
    charts = maker.charts()
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(
        [
            *_header(record),
            '<div class="grid">',
            *(_chart(chart) for chart in charts),
            "</div>",
            *_lanes(lanes),
            *_memory(account),
            *_tables(record, lanes),
        ]
    )
    whole = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(record.name)}: a training run</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{embedded_json(page_data(maker.steps, charts, lanes))}</script>
<script>{script}</script>
</body>
</html>
"""
    # Names of files need not be UTF-8, nor what damaged rows hold; the page is.
    return whole.encode(errors="replace").decode()


def embedded_json(value: object) -> str:
    """JSON that cannot end the script element it stands in, whatever text is in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _header(record: RunRecord) -> Iterator[str]:
    yield f'<header><h1>{escape(record.name)}</h1><p class="sub">{escape(str(record.directory))}</p></header>'
    if record.unreadable_lines:
        yield f'<p class="note">{record.unreadable_lines} unreadable line(s) passed over.</p>'
    if not record.steps:
        yield '<p class="note">No step is finished yet.</p>'
        return
    loss, speed = record.column("loss"), record.column("tokens_per_s")
    finite = [value for value in loss if math.isfinite(value)]
    held_out = [value for _, value in record.evaluations if math.isfinite(value)]
    total_s = math.fsum(value for value in record.column("step_s") if math.isfinite(value))
    tokens = math.fsum(value for value in record.column("tokens") if math.isfinite(value))
    skipped = f' <small class="warn">{len(record.skipped)} skipped</small>' if record.skipped else ""
    tiles = [
        ("steps", f"{record.steps[-1]:,}{skipped}"),
        ("loss", f"{number(finite[-1])} <small>from {number(finite[0])}</small>" if finite else ""),
        ("held-out loss", f"{number(held_out[-1])} <small>best {number(min(held_out))}</small>" if held_out else ""),
        ("tokens", f"{shown_count(tokens)} <small>in {shown_duration(total_s)}</small>"),
        ("tokens/s", f"{shown_count(median(speed))} <small>median</small>"),
        ("model TFLOP/s", f"{number(median(record.column('model_tflops')))} <small>median</small>"),
        ("host memory", _most(record.column("host_bytes"))),
        ("device memory", _most(record.column("gpu_peak_bytes"))),
    ]
    yield '<dl class="tiles">'
    yield from (f'<div class="tile"><dt>{name}</dt><dd>{value}</dd></div>' for name, value in tiles if value)
    yield "</dl>"


def _most(values: list[float]) -> str:
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    return f"{shown_bytes(most)} <small>at most</small>" if most else ""


def _chart(chart: Chart) -> str:
    keys = [(series.name, f"f{series.colour}") for series in chart.series if not series.thin]
    keys += [("held out", "f1")] if chart.points else []
    keys += [("skipped", "fbad")] if chart.marked else []
    legend = _legend(keys) if len(keys) > 1 else ""
    wide = " wide" if chart.id == "loss" else ""
    return (
        f'<section class="card{wide}"><div class="head"><h2>{escape(chart.title)}</h2>{legend}</div>'
        f'<div class="plot" id="{chart.id}"></div></section>'
    )


def _legend(keys: list[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i class="key {colour}"></i>{escape(name)}</span>' for name, colour in keys)
    return f'<div class="legend">{spans}</div>'


_OPERATIONS = [
    ("forward, recompute", "f0"),
    ("head, evaluate", "f6"),
    ("backward", "f4"),
    ("stage, load", "f2"),
    ("offload, store", "f3"),
    ("update", "f1"),
    ("snapshot", "f5"),
]


def _lanes(lanes: StepLanes | None) -> Iterator[str]:
    yield '<div class="grid"><section class="card wide gap">'
    if lanes is None:
        yield '<h2>Lanes of a step</h2><p class="note">No step was recorded (log.events_max_mib).</p></section></div>'
        return
    yield (
        f'<div class="head"><h2>Lanes of step {lanes.step:,}: {shown_duration(lanes.length_s)}</h2>'
        f"{_legend(_OPERATIONS)}"
        '<label>zoom <input type="range" id="zoom" min="0" max="5" step="0.25" value="0"></label></div>'
    )
    yield '<div class="lanes" id="lanes" tabindex="0" aria-label="lanes in time; the tables below have the same"></div>'
    yield lanes_table(lanes)
    yield (
        '<p class="note">From the end of the backward pass before this step to the end of its own: the updates at its '
        "beginning belong to the step before wherever gradients are clipped.</p>"
    )
    if sum(len(row) for lane in lanes.lanes for row in lane.rows) > MAX_SPANS:
        yield f'<p class="note">Only {MAX_SPANS:,} operations are drawn.</p>'
    yield "</section></div>"


def _memory(account: MemoryAccount | str) -> Iterator[str]:
    yield '<div class="grid"><section class="card wide gap"><h2>Where every byte lives</h2>'
    if isinstance(account, str):
        yield f'<p class="note">{escape(account)}</p>'
    else:
        yield (
            f'<p class="note">{escape(account.model_type)}, {account.parameters:,} parameters. As placed at the last '
            f"start, before anything was allocated.</p>{account_table(account)}"
        )
    yield "</section></div>"


def _tables(record: RunRecord, lanes: StepLanes | None) -> Iterator[str]:
    if record.steps:
        yield f"<details><summary>Steps</summary>{steps_table(record)}</details>"
    if record.evaluations:
        yield f"<details><summary>Evaluations</summary>{evaluations_table(record)}</details>"
    if lanes is not None:
        yield f"<details><summary>Operations of step {lanes.step:,}</summary>{operations_table(lanes)}</details>"
    if record.recipe_toml is not None:
        yield f"<details><summary>Recipe</summary><pre>{escape(record.recipe_toml)}</pre></details>"
