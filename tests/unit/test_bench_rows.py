"""Rows of a table: every mixture once, written as soon as known, none stopped by another, misses of a plan marked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.memory.footprint import GIB
from pipeline.stalls import Stalls
from support.small_recipe import write_one_step
from tasks.bench.__main__ import main
from tasks.bench.comparison import Figure
from tasks.bench.roof import RoofReport
from tasks.bench.rows import Row, RowResult, rows_of, run_rows
from tasks.bench.step import StepReport
from tasks.bench.table import table

RECIPES = (Path("a.toml"), Path("b.toml"))
ROOF = RoofReport(1.0, 400.0, GIB)
STEP = StepReport(
    parameters=10**9,
    tokens=1,
    step_s=2.0,
    step_s_all=(2.0,),
    tokens_per_s=0.5,
    model_tflops=300.0,
    lanes={},
    stalls=Stalls(update=0.25),
    gaps=(),
    update_gparams_per_s=1.0,
    gpu_peak_bytes=GIB,
    compiled_graphs=4,
    compiled_late=0,
    device_taken_bytes=0,
    host_bytes=14 * 10**9,
    host_taken_bytes=15 * 10**9,
    arena_bytes=1,
    nvme_read_bytes=0,
    nvme_write_bytes=0,
    first_step_s=60.0,
    loss=1.0,
    grad_norm=1.0,
)


def test_every_recipe_meets_every_mixture_of_the_swept_values() -> None:
    rows = rows_of(RECIPES, ["train.steps=9"], ["memory.kept_layers=0,4", "train.micro_batch=1,2"])
    assert len(rows) == 8
    assert rows[1].overrides == ("train.steps=9", "memory.kept_layers=0", "train.micro_batch=2")
    assert rows[1].name == "a memory.kept_layers=0 train.micro_batch=2"
    assert [row.name for row in rows_of(RECIPES, ["train.steps=9"], [])] == ["a", "b"]
    with pytest.raises(ValueError, match=r"section\.key=value,value"):
        rows_of(RECIPES, [], ["memory.kept_layers"])


def test_a_row_that_fails_is_reported_and_the_others_are_measured_and_on_disk_at_once(tmp_path: Path) -> None:
    out, seen, said = tmp_path / "rows.jsonl", [], []
    out.write_text("of an earlier run\n")

    def measure(row: Row) -> Mapping[str, object]:
        seen.append([json.loads(line)["row"] for line in out.read_text().splitlines()])
        if row.name == "b":
            raise RuntimeError("no room\nat all")
        return {"roof": ROOF, "plan": (Figure("step", "s", 1.0, 1.0),)}

    rows = rows_of((*RECIPES, Path("c.toml")), [], [])
    results = run_rows(rows, measure, out=out, say=said.append)
    assert seen == [[], ["a"], ["a", "b"]]
    assert [result.error for result in results] == [None, "RuntimeError: no room\nat all", None]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["roof"]["step_s"] == 1.0 and lines[0]["plan"][0]["name"] == "step"
    assert lines[1]["error"].startswith("RuntimeError") and "roof" not in lines[1]
    assert any("b: failed: RuntimeError" in line for line in said)
    assert "- b: failed: RuntimeError: no room" in table(results)


def test_rows_that_no_time_is_left_for_are_left_out_and_said() -> None:
    said: list[str] = []
    assert run_rows(rows_of(RECIPES, [], []), lambda _: {}, out=None, say=said.append, until_s=time.monotonic()) == ()
    assert [line.split(":")[1].split(",")[0] for line in said] == [" left out", " left out"]


def test_the_table_marks_what_a_plan_may_not_miss() -> None:
    def result(name: str, *plan: Figure) -> RowResult:
        row = Row(RECIPES[0], (), name)
        return RowResult(row, 1.0, {"roof": ROOF, "step": STEP, "plan": plan})

    host, device = "host: arena, driver and actors", "device: torch's peak"
    good = result("good", Figure("step", "s", 2.2, 2.0), Figure(host, "bytes", 1.04, 1.0), Figure("busy", "s", 9, 1))
    bad = result(
        "bad", Figure("step", "s", 1.6, 2.0), Figure(host, "bytes", 0.99, 1.0), Figure(device, "bytes", 1.06, 1.0)
    )
    text = table([good, bad])
    lines = text.splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == lines[3].count("|")
    assert "**" not in lines[2] and "2.000 s (plan +10.0%)" in lines[2] and "75.0%" in lines[2]
    assert "update 0.25 s" in lines[2] and "14.00" in lines[2] and "60 s" in lines[2]
    assert lines[3].count("**") == 6 and "2.000 s (**plan -20.0%**)" in lines[3]
    assert [line.split(": ")[0] for line in lines[5:]] == ["- bad"] * 3
    assert f"- bad: {host}: the plan lies -1.0% off the measurement, +0% to +5% are allowed" in lines


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1:1", 1), ("anywhere", 2)])
def test_a_head_that_is_not_there_is_said_in_words(
    address: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["control", str(write_one_step(tmp_path, words=500))]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {'failed' if status == 1 else 'refused'}: ") and address in error
    assert error.count("\n") == 1


def test_rows_go_to_a_device_too_and_to_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_rows(rows_of(RECIPES, [], []), lambda _: {}, out=Path("/dev/null"), say=lambda _: None)
    assert [result.error for result in results] == [None, None] and Path("/dev/null").is_char_device()
    assert main(["roof", str(write_one_step(tmp_path, words=5)), "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_rows_are_refused_where_one_report_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizer", "--sweep", "train.steps=1,2"]) == 2
    assert "takes one recipe" in capsys.readouterr().err
    assert main(["step", "none.toml"]) == 2
    assert "no such recipe" in capsys.readouterr().err
