"""The report shows what a run recorded, whatever its length and state, and nothing in it can break out of the page."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.memory.footprint import Place, Term
from pipeline.messages import Lane, LaneSpan
from tasks import report
from tasks.memory_account import MemoryAccount
from tasks.report_page.page import embedded_json
from tasks.report_page.run_events import index_events, read_step, typical_step
from tasks.report_page.run_record import read_run
from tasks.report_page.step_lanes import lanes_of, packed
from tasks.report_page.thinning import bucket_ends, even_rows, smoothed, thinned

RECIPE = """
[run]
name = "test"
dir = "/nowhere"
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 97
[data]
path = ["/nowhere"]
[train]
steps = 9
sequence_length = 8
sequences_per_step = 1
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def metrics_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 1000,
        "step_s": 2.0,
        "tokens_per_s": 500.0,
        "model_tflops": 432.1,
        "stall_s": {"load": 0.0, "stage": 0.25, "update": 0.5, "data": 0.0},
        "gpu_peak_bytes": 3 << 30,
        "host_bytes": 7 << 30,
        "nvme_read_bytes": 0,
        "nvme_write_bytes": 0,
        "skipped": False,
        "skip_reason": None,
    }
    return row | changes


def span(name: str, lane: Lane, start_s: float, end_s: float, actor: str = "compute", num_bytes: int = 0) -> LaneSpan:
    return LaneSpan(name, lane, actor, start_s, end_s, num_bytes)


def events_of(step: int, begin_s: float) -> list[dict[str, Any]]:
    """A step of 10 s: two layers, its update beside the next step's forward and collected with it."""
    held = [
        span("stage[0]", Lane.H2D, begin_s, begin_s + 0.5, num_bytes=1 << 20),
        span("forward[0]", Lane.COMPUTE, begin_s + 1, begin_s + 3),
        span("forward[1]", Lane.COMPUTE, begin_s + 3, begin_s + 5),
        span("backward[1]", Lane.COMPUTE, begin_s + 5, begin_s + 8),
        span("backward[0]", Lane.COMPUTE, begin_s + 8, begin_s + 10),
        span("update[0]", Lane.UPDATE, begin_s + 0.5, begin_s + 1, "optimizer-0"),
        span("update[0]", Lane.UPDATE, begin_s + 0.5, begin_s + 1.5, "optimizer-1"),
        span("load_state[1]", Lane.NVME_READ, begin_s, begin_s + 4, "prefetcher", 4 << 30),
        span("load_state[2]", Lane.NVME_READ, begin_s + 1, begin_s + 5, "prefetcher", 4 << 30),
    ]
    keys = ("name", "lane", "actor", "start_s", "end_s", "num_bytes")
    return [{"step": step} | {key: getattr(one, key) for key in keys} for one in held]


def write_run(directory: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]], tail: str = "") -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    (directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (directory / "evaluation.jsonl").write_text('{"step": 0, "loss": 6.25}\n{"step": 3, "loss": null}\n')
    (directory / "recipe.toml").write_text(RECIPE)
    return directory


def page_of(run: Path) -> str:
    assert report.main([str(run)]) == 0
    return (run / "report.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


@given(st.integers(0, 5000), st.integers(1, 300))
def test_buckets_cover_every_value_once_and_evenly(count: int, limit: int) -> None:
    ends = bucket_ends(count, limit)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == count and len(ends) == min(count, limit)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_thinning_keeps_the_spike_and_passes_over_what_is_not_finite() -> None:
    values = [1.0] * 1000
    values[777], values[778] = 50.0, math.nan
    buckets = thinned(values, bucket_ends(1000, 10))
    assert [bucket.high for bucket in buckets] == [1.0] * 7 + [50.0] + [1.0] * 2
    assert all(bucket.low == 1.0 for bucket in buckets)
    assert thinned([math.nan, math.inf], [2])[0].mean is None


def test_smoothing_starts_at_the_first_value_and_stands_still_without_one() -> None:
    averages = smoothed([math.nan, 4.0, math.nan, 4.0])
    assert math.isnan(averages[0]) and averages[1:] == [4.0, 4.0, 4.0]


@given(st.integers(0, 1000), st.integers(2, 50))
def test_evenly_chosen_rows_have_both_ends(count: int, limit: int) -> None:
    rows = even_rows(count, limit)
    assert rows == sorted(set(rows)) and len(rows) == min(count, limit)
    assert not count or (rows[0], rows[-1]) == (0, count - 1)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=30))
def test_rows_of_a_lane_never_overlap_and_are_as_few_as_can_be(times: list[tuple[int, int]]) -> None:
    spans = [span("stage[0]", Lane.H2D, start, start + length) for start, length in times]
    rows = packed(spans)
    assert sorted(map(id, (one for row in rows for one in row))) == sorted(map(id, spans))
    for row in rows:
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(row))
    at_once = max((sum(s.start_s <= one.start_s < s.end_s for s in spans) for one in spans), default=0)
    assert len(rows) == at_once


def test_busy_share_counts_overlaps_once_and_only_inside_the_window() -> None:
    spans = [span(f"load_state[{n}]", Lane.NVME_READ, n, n + 2.0, num_bytes=8) for n in range(4)]
    lanes = lanes_of(spans, 1, 1.0, 9.0).lanes
    assert [(lane.title, lane.busy, len(lane.rows)) for lane in lanes] == [("NVMe read", 0.5, 2)]


def test_a_step_is_from_the_end_of_one_backward_pass_to_the_end_of_the_next(tmp_path: Path) -> None:
    events = [row for step in (1, 2, 3) for row in events_of(step, 10.0 * step)]
    record = read_run(write_run(tmp_path / "run", [metrics_row(1), metrics_row(2), metrics_row(3)], events))
    index = index_events(record)
    lanes = read_step(record, index, 2)
    assert lanes is not None and (lanes.start_s, lanes.end_s) == (20.0, 30.0)
    busy = {lane.title: lane.busy for lane in lanes.lanes}
    assert busy == {
        "NVMe read": 0.5,
        "host to device": 0.05,
        "compute": 0.9,
        "update, optimizer-0": 0.05,
        "update, optimizer-1": 0.1,
    }


def test_the_step_shown_is_one_of_median_length(tmp_path: Path) -> None:
    rows = [metrics_row(step, step_s=length) for step, length in enumerate([9.0, 2.0, 2.1, 30.0, 2.1], 1)]
    record = read_run(write_run(tmp_path / "run", rows, []))
    assert typical_step(record, {1, 2, 3, 4, 5}) == 5
    assert typical_step(record, set()) is None


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    rows = [metrics_row(step) for step in (1, 2, 3, 4)] + [metrics_row(3, loss=9.0, stall_s={"control": 1.0})]
    record = read_run(write_run(tmp_path / "run", rows, [], tail='{"step": 4, "lo'))
    assert record.steps == [1, 2, 3] and record.column("loss")[-1] == 9.0
    assert record.unreadable_lines == 1
    assert record.column("stall_s.control")[-1] == 1.0 and math.isnan(record.column("stall_s.stage")[-1])


def test_the_page_says_where_held_gradients_and_every_other_byte_live(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [metrics_row(1)], [])
    assert "memory.json is missing" in page_of(run)
    terms = (
        Term(Place.RAM, "gradients", 3 << 30, "of 3 layers, held until the global norm is known, pinned"),
        Term(Place.DEVICE, "held gradients", 5 << 20, "of 2 layers, until the norm"),
        Term(Place.DEVICE, "weight slots", 1 << 20, "<two>"),
    )
    (run / "memory.json").write_text(MemoryAccount("llama", 1 << 30, terms).as_json())
    page = page_of(run)
    for row in ("<td>gradients</td><td>3.00 GiB</td><td>3.00</td>", "<td>held gradients</td><td>5.00 MiB</td>"):
        assert row in page
    assert "<b>device memory</b></td><td>6.00 MiB</td>" in page and "&lt;two&gt;" in page


def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    rows = [metrics_row(step) for step in range(1, 20_001)]
    page = page_of(write_run(tmp_path / "run", rows, []))
    data = data_of(page)
    assert len(data["steps"]) == 1500 and data["steps"][-1] == 20_000
    assert len(page) < 2_000_000


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>&"
    events = events_of(1, 1.0)
    events[1]["name"] = events[5]["actor"] = evil
    run = write_run(tmp_path / "<b>&run", [metrics_row(1, loss=None, skipped=True, skip_reason=evil)], events)
    page = page_of(run)
    assert "<img" not in page and "<b>" not in page.replace("<b>&", "") and "&lt;b&gt;&amp;run" in page
    assert evil in json.dumps(data_of(page)).replace("\\u003c", "<")
    assert json.loads(embedded_json({"a": evil})) == {"a": evil}


@pytest.mark.parametrize("held", [(), ("recipe.toml",), ("metrics.jsonl",)])
def test_a_run_without_steps_has_a_page_and_no_run_has_none(
    tmp_path: Path, held: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in held:
        (tmp_path / name).write_text("")
    assert report.main([str(tmp_path)]) == (0 if held else 2)
    if held:
        assert "No step is finished yet" in (tmp_path / "report.html").read_text()
    else:
        assert capsys.readouterr().err.count("\n") == 1


def test_refusals_say_what_there_is_and_leave_the_old_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)], events_of(1, 1.0) + events_of(2, 11.0))
    before = page_of(run)
    for arguments, part in (
        ([str(run), "--step", "7"], "steps 1 to 2"),
        ([str(run), "--out", str(tmp_path / "no" / "page.html")], "--out"),
        ([str(run), "--out", str(tmp_path)], "--out"),
        ([str(tmp_path / "nothing")], "no directory"),
    ):
        assert report.main(arguments) == 2
        assert part in capsys.readouterr().err
    assert (run / "report.html").read_text() == before
    (run / "link").symlink_to("report.html")
    assert report.main([str(run), "--out", str(run / "link")]) == 0
    assert (run / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


HUGE = "9" * 400
"""A whole number that is no float."""


@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}", "1e308", "1e999", "NaN", "[]", "9" * 5000])
def test_numbers_that_cannot_be_computed_with_are_passed_over(tmp_path: Path, value: str) -> None:
    rows = [metrics_row(step) for step in (1, 2, 3)]
    events = [row for step in (1, 2, 3) for row in events_of(step, 10.0 * step)]
    run = write_run(tmp_path / "run", rows, events)
    plain = page_of(run)
    for name, keys in (
        ("metrics", [*(key for key in rows[0] if not key.startswith("s")), "step_s", "stage", "step"]),
        ("events", ["start_s", "end_s", "num_bytes", "step"]),
        ("evaluation", ["loss", "step"]),
    ):
        path = run / f"{name}.jsonl"
        text = path.read_text()
        for key in keys:
            # Of several damaged rows even what is a float may end their sum.
            damaged = re.sub(rf'"{key}": [^,}}]+', f'"{key}": {value}', "".join(text.splitlines(keepends=True)[1:]))
            path.write_text(text + damaged)
            assert "Lanes of step" in page_of(run), (name, key)
        path.write_text(text)
    assert page_of(run) == plain


@pytest.mark.parametrize("value", [HUGE, "1e999", "-1", "1.5", "null", '"1"'])
@pytest.mark.parametrize("key", ["parameters", "num_bytes"])
def test_a_damaged_account_of_memory_is_told_and_the_page_made(tmp_path: Path, key: str, value: str) -> None:
    run = write_run(tmp_path / "run", [metrics_row(1)], [])
    text = MemoryAccount("llama", 7, (Term(Place.RAM, "weights", 14, "two bytes each"),)).as_json()
    for damaged in (value, "0") if key == "parameters" else (value,):
        (run / "memory.json").write_text(re.sub(rf'"{key}": \d+', f'"{key}": {damaged}', text))
        assert "memory.json cannot be read: " in page_of(run)
    (run / "memory.json").write_text(text)
    assert "two bytes each" in page_of(run)


def test_a_run_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    rows = [metrics_row(1, skipped=True, skip_reason="\ud800")]
    run = write_run(tmp_path / os.fsdecode(b"r\xfc"), rows, [])
    assert "<h1>r?</h1>" in page_of(run)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_every_chart_and_lane_without_a_complaint(tmp_path: Path) -> None:
    events = [row for step in (1, 2, 3) for row in events_of(step, 10.0 * step)]
    rows = [metrics_row(1), metrics_row(2, loss=None, grad_norm=None, skipped=True, skip_reason="nan"), metrics_row(3)]
    page_of(write_run(tmp_path / "a <run>", rows, events))
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    shown = subprocess.run(
        [*command, (tmp_path / "a <run>" / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    drawn = shown.stdout
    for chart in ("loss", "speed", "stalls", "lr", "norm", "time", "memory"):
        assert re.search(rf'id="{chart}"><svg.*?<(path|polygon)', drawn), chart
    assert ">backward[1]</text>" in drawn and "90 % busy" in drawn and ">432.1 <" in drawn
    assert drawn.count('class="lane"') == 5
