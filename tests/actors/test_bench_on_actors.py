"""Measurements by real actors on a model small enough for a test: figures that hold together."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from tasks.bench.__main__ import main
from tasks.bench.control import measure_control
from tasks.preparation import Preparation, prepare

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_local")]

RECIPE = Path(__file__).parents[2] / "tasks" / "recipes" / "bench" / "qwen2.5-0.5b.toml"
SETTINGS = (
    'model.config={model_type="qwen2",vocab_size=512,hidden_size=64,intermediate_size=128,num_hidden_layers=2,'
    "num_attention_heads=4,num_key_value_heads=2,tie_word_embeddings=true}",
    *("train.device=cpu", "train.sequence_length=32", "train.sequences_per_step=2", "train.micro_batch=2"),
    *("precision.mode=fp32", "memory.optimizer_actors=1"),
)


@pytest.fixture
def preparation() -> Preparation:
    return prepare(load_recipe(RECIPE, SETTINGS))


def test_rows_of_steps_are_written_and_shown_and_one_that_is_refused_stops_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.bench.step_rows.connect", lambda **_: nullcontext())  # this test's Ray is up
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    out = tmp_path / "rows.jsonl"
    sweep = ["--sweep", "memory.decoder_slots=0,2", "--steps", "2", "--no-roof", "--hardware", "h200-measured"]
    assert main(["step", str(RECIPE), *settings, *sweep, "--out", str(out)]) == 1
    refused, measured = (json.loads(line) for line in out.read_text().splitlines())
    assert "memory.decoder_slots" in refused["error"] and "step" not in refused
    assert measured["error"] is None and len(measured["step"]["step_s_all"]) == 2
    assert {"step", "host: all that became unavailable"} <= {figure["name"] for figure in measured["plan"]}
    shown = capsys.readouterr().out
    assert "| qwen2.5-0.5b memory.decoder_slots=2 |" in shown
    assert "- qwen2.5-0.5b memory.decoder_slots=0: failed: RecipeError" in shown


def test_a_checkpoint_is_measured_beside_steps_as_a_run_writes_it_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.bench.__main__.connect", lambda **_: nullcontext())  # this test's Ray is up
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    options = ("--compression", "none", "--steps", "2", "--rounds", "1", "--dir", str(tmp_path), "--json")
    wide = ("--set", "model.config.hidden_size=512", "--set", "model.config.intermediate_size=4096")
    assert main(["checkpoint", str(RECIPE), *settings, *wide, *options]) == 0
    assert not list(tmp_path.iterdir())
    shown = capsys.readouterr()
    report = json.loads(shown.out)["checkpoint none"]
    (one,) = report["rounds"]
    assert one["spanned_steps"] >= 1 and report["spanned_step_s"] == one["spanned_step_s"] > 0
    assert report["num_bytes"] > report["state_bytes"] and 0 < one["publish_s"] < one["seconds"]
    assert report["gbps"] == pytest.approx(report["num_bytes"] / (one["seconds"] - one["publish_s"]) / 1e9)
    overhead = one["spanned_step_s"] / one["step_s"] - 1
    assert report["lost_s"] == pytest.approx(overhead * one["step_s"] * one["spanned_steps"])
    assert min(report["host_bytes"], report["host_peak_bytes"]) > report["state_bytes"]
    assert 16 << 20 <= report["staging_bytes"] < report["state_bytes"] / 2
    assert "checkpoint of step" in shown.err


def test_the_graph_of_calls_is_measured_beside_the_same_graph_without_ray(preparation: Preparation) -> None:
    report = measure_control(preparation, steps=3, rounds=1, say=lambda _: None)
    assert report.calls >= report.operations > 10
    assert 0 < report.idle_s < report.step_s
    assert report.inline_step_s > 0 and report.submit_s > 0 and report.call_s > 0 and report.streamed_call_s > 0
