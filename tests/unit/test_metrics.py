from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.json_lines import JsonLines
from pipeline.messages import Lane, LaneSpan
from pipeline.metrics import (
    ConsoleLog,
    EvaluationWriter,
    EventsWriter,
    MetricsWriter,
    RunGauges,
    StallSeconds,
    StepMetrics,
)

ONE = StepMetrics(
    step=1,
    applied_steps=1,
    loss=2.431,
    lr=3e-4,
    grad_norm=0.834,
    tokens=1000,
    supervised_tokens=900,
    step_s=0.5,
    tokens_per_s=12_345.6,
    model_tflops=1.5,
    stall_s=StallSeconds(stage=0.25),
    gpu_peak_bytes=0,
    host_bytes=10,
    nvme_read_bytes=0,
    nvme_write_bytes=0,
    skipped=False,
)


def at(step: int, **changes: Any) -> StepMetrics:
    return dataclasses.replace(ONE, step=step, **changes)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(run_dir: Path, steps: range, resumed_step: int = 0) -> list[dict[str, Any]]:
    writer = MetricsWriter(run_dir, resumed_step)
    for step in steps:
        writer.write(at(step))
    writer.close()
    return rows(run_dir / "metrics.jsonl")


def test_a_row_has_every_documented_field(tmp_path: Path) -> None:
    (row,) = write(tmp_path / "new/run", range(1, 2))
    documented = (
        "step loss lr grad_norm tokens supervised_tokens step_s tokens_per_s model_tflops stall_s gpu_peak_bytes "
        "host_bytes nvme_read_bytes nvme_write_bytes skipped"
    )
    assert set(documented.split()) <= set(row)
    assert row["stall_s"] == {"load": 0.0, "stage": 0.25, "update": 0.0, "data": 0.0}
    assert row["skipped"] is False
    assert row["non_finite"] == []


def test_rows_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(at(1))
    assert len(rows(tmp_path / "metrics.jsonl")) == 1
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_named_and_never_zero(tmp_path: Path, value: float) -> None:
    """B19."""
    writer = MetricsWriter(tmp_path)
    writer.write(at(1, loss=value, grad_norm=value, skipped=True, skip_reason="loss is not finite"))
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["non_finite"] == ["loss", "grad_norm"]
    assert row["lr"] == 3e-4


def test_resume_drops_the_rows_that_are_computed_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    assert [row["step"] for row in write(tmp_path, range(4, 6), resumed_step=3)] == [1, 2, 3, 4, 5]
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_from_the_start_drops_all_rows(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    assert [row["step"] for row in write(tmp_path, range(1, 3))] == [1, 2]


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 3}', b"\x00\x00\n", b"[1]\n", b'{"loss": 1}\n'])
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert [row["step"] for row in write(tmp_path, range(3, 4), resumed_step=2)] == [1, 2, 3]


def test_a_file_without_anything_to_drop_is_left_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    before = (tmp_path / "metrics.jsonl").stat()
    JsonLines(tmp_path / "metrics.jsonl", 2).close()
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_rows_refuse_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "rows.jsonl", 0) as lines, pytest.raises(ValueError, match="Out of range"):
        lines.append({"step": 1, "loss": math.nan})


def test_evaluations_have_a_file_of_their_own(tmp_path: Path) -> None:
    writer = EvaluationWriter(tmp_path)
    writer.write(5, 2.0, 300)
    writer.write(10, math.nan, 0)
    writer.close()
    first, second = rows(tmp_path / "evaluation.jsonl")
    assert first == {"step": 5, "loss": 2.0, "supervised_tokens": 300, "non_finite": []}
    assert second["loss"] is None
    assert second["non_finite"] == ["loss"]


def spans(count: int) -> list[LaneSpan]:
    return [LaneSpan(f"forward[{layer}]", Lane.COMPUTE, "compute", 1.0, 2.0, 3) for layer in range(count)]


def test_events_are_written_by_operation(tmp_path: Path) -> None:
    writer = EventsWriter(tmp_path, max_mib=1)
    writer.write(4, spans(2))
    writer.close()
    assert rows(tmp_path / "events.jsonl")[1] == {
        "step": 4,
        "name": "forward[1]",
        "lane": "compute",
        "actor": "compute",
        "start_s": 1.0,
        "end_s": 2.0,
        "num_bytes": 3,
    }


def test_events_end_at_the_limit_with_a_whole_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    writer = EventsWriter(tmp_path, max_mib=1)
    for step in range(1, 6):
        writer.write(step, spans(5000))
    writer.close()
    written = [row["step"] for row in rows(tmp_path / "events.jsonl")]
    assert [written.count(step) for step in range(1, 6)] == [5000, 5000, 0, 0, 0]
    assert caplog.text.count("log.events_max_mib") == 1
    assert not EventsWriter(tmp_path, max_mib=1, resumed_step=5).recording
    nothing = EventsWriter(tmp_path / "other", max_mib=0)
    nothing.write(1, spans(3))
    assert rows(tmp_path / "other/events.jsonl") == []


def shown(total: int, metrics: list[StepMetrics], every_s: float = 0.0, seconds_apart: float = 1.0) -> list[str]:
    stream = io.StringIO()
    now = iter(range(1000))
    console = ConsoleLog(total, every_s, stream, clock=lambda: next(now) * seconds_apart)
    for row in metrics:
        console.step(row)
    assert "\r" not in stream.getvalue()
    return stream.getvalue().splitlines()


def test_nobody_else_reads_the_rows_of_a_run(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run")
    writer.write(ONE)
    writer.close()
    for path in (tmp_path / "run", tmp_path / "run" / "metrics.jsonl"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_line_a_step() -> None:
    (line,) = shown(400, [at(120, step_s=192 / 280)])
    assert line == "step 120/400  loss 2.4310  lr 3.0e-04  |g| 0.834  12.3k tok/s  eta 192 s"


def test_a_slow_step_does_not_move_the_time_left() -> None:
    steps = [at(1, step_s=600.0)] + [at(step, step_s=1.0) for step in range(2, 40)]
    assert shown(100, steps)[-1].endswith("eta 61.0 s")
    assert shown(100, [at(step, step_s=300.0 if step == 30 else 1.0) for step in range(1, 31)])[-1].endswith(
        "eta 70.0 s"
    )


def test_lines_are_thinned_by_time_but_never_the_first_the_last_or_a_skipped_one() -> None:
    steps = [at(step, skipped=step == 3, skip_reason="no supervised token") for step in range(1, 9)]
    lines = shown(8, steps, every_s=4.0)
    assert [line.split()[1] for line in lines] == ["1/8", "3/8", "7/8", "8/8"]
    assert "skipped: no supervised token" in lines[1]
    assert lines[-1].endswith("done")


def test_not_a_number_is_shown_as_such() -> None:
    (line,) = shown(9, [at(1, loss=math.nan, grad_norm=math.nan, skipped=True)])
    assert "loss nan" in line
    assert "skipped: not finite" in line


def test_evaluation_line() -> None:
    stream = io.StringIO()
    ConsoleLog(400, stream=stream).evaluation(120, 2.5, 12_000)
    assert stream.getvalue() == "eval 120/400  loss 2.5000  12k tokens\n"


def test_gauges_do_nothing_without_ray() -> None:
    gauges = RunGauges("tiny")
    gauges.step(ONE)


@pytest.mark.ray
def test_gauges_take_a_step_and_not_a_number(ray_local: None) -> None:
    for _ in range(2):
        gauges = RunGauges("tiny")
        gauges.step(ONE)
        gauges.step(at(2, loss=math.nan, skipped=True))
