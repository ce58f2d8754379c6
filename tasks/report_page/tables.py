"""The tables of a page: all that the charts show, for those who read and those whose browser runs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from pipeline.memory.footprint import TIER_NAMES, Place
from tasks.memory_account import MemoryAccount
from tasks.report_page.run_record import STALL, RunRecord
from tasks.report_page.step_lanes import StepLanes
from tasks.report_page.thinning import even_rows
from tiers.quantities import shown_bytes, shown_duration

MAX_STEP_ROWS = 100
MAX_OPERATION_ROWS = 1500


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "figures") -> str:
    """A table of cells that are HTML already; `kind` is a class of the style sheet."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def steps_table(record: RunRecord) -> str:
    """Rows of steps, evenly chosen where there are many."""
    held_out = dict(record.evaluations)
    reasons = dict(record.skipped)
    columns = {
        name: record.column(name)
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "host_bytes", "gpu_peak_bytes")
    }
    stalls = [record.column(STALL + cause) for cause in record.stall_causes]
    rows = []
    for place in even_rows(len(record.steps), MAX_STEP_ROWS):
        step = record.steps[place]
        rows.append(
            (
                str(step),
                number(columns["loss"][place]),
                number(held_out.get(step, math.nan)),
                number(columns["lr"][place]),
                number(columns["grad_norm"][place]),
                number(columns["tokens_per_s"][place]),
                _or_dash(shown_duration, columns["step_s"][place]),
                _or_dash(shown_duration, math.fsum(stall[place] for stall in stalls)),
                _or_dash(shown_bytes, columns["host_bytes"][place]),
                _or_dash(shown_bytes, columns["gpu_peak_bytes"][place] or math.nan),
                escape(reasons.get(step, "")),
            )
        )
    heading = ("step", "loss", "held out", "lr", "grad norm", "tokens/s", "time", "stalls", "host", "device", "skipped")
    return table(heading, rows)


def evaluations_table(record: RunRecord) -> str:
    """Losses on held-out data."""
    places = even_rows(len(record.evaluations), MAX_STEP_ROWS)
    return table(
        ("step", "loss on held-out data"),
        ((str(record.evaluations[place][0]), number(record.evaluations[place][1])) for place in places),
    )


def lanes_table(lanes: StepLanes) -> str:
    """Busy share, bytes and rate of each lane."""
    rows = []
    for lane in lanes.lanes:
        busy_s = lane.busy * lanes.length_s
        rate = f"{lane.num_bytes / busy_s / 1e9:.3g} GB/s" if lane.num_bytes and busy_s else ""
        rows.append(
            (
                escape(lane.title),
                f'{lane.busy:.1%} <meter min="0" max="1" value="{lane.busy:.4f}"></meter>',
                shown_duration(busy_s),
                str(sum(map(len, lane.rows))),
                shown_bytes(lane.num_bytes) if lane.num_bytes else "",
                rate,
            )
        )
    return table(("lane", "busy", "at work", "operations", "bytes", "while at work"), rows)


def operations_table(lanes: StepLanes) -> str:
    """Every operation of the step, in order of time."""
    spans = sorted(
        ((span, lane.title) for lane in lanes.lanes for row in lane.rows for span in row),
        key=lambda held: held[0].start_s,
    )
    rows = (
        (
            escape(span.name),
            escape(title),
            shown_duration(span.start_s - lanes.start_s),
            shown_duration(span.end_s - span.start_s),
            shown_bytes(span.num_bytes) if span.num_bytes else "",
        )
        for span, title in spans[:MAX_OPERATION_ROWS]
    )
    return table(("operation", "lane", "from", "for", "bytes"), rows)


def account_table(account: MemoryAccount) -> str:
    """Every term of host memory, of the device and of NVMe, under the sum of its place."""

    def row(name: str, num_bytes: int, why: str) -> tuple[str, str, str, str]:
        return name, shown_bytes(num_bytes), f"{num_bytes / account.parameters:.2f}", escape(why)

    rows = []
    for place in Place:
        terms = [term for term in account.terms if term.place is place]
        if terms:
            rows.append(row(f"<b>{TIER_NAMES[place]}</b>", sum(term.num_bytes for term in terms), ""))
            rows += [row(escape(term.name), term.num_bytes, term.why) for term in terms]
    return table(("", "bytes", "a parameter", ""), rows, kind="account")


def number(value: float) -> str:
    """Four significant digits; a dash for none."""
    if not math.isfinite(value):
        return "&ndash;"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _or_dash(show: Callable[[float], str], value: float) -> str:
    return show(value) if math.isfinite(value) else "&ndash;"
