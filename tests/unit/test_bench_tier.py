"""The tier and the optimizer pool measured on a model small enough for a test: figures that hold together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.bench.__main__ import main
from tasks.bench.optimizer import mixtures

CONFIG = (
    '{model_type="qwen2",vocab_size=512,hidden_size=256,intermediate_size=512,num_hidden_layers=4,'
    "num_attention_heads=4,num_key_value_heads=2,tie_word_embeddings=true}"
)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main([*arguments, "--set", f"model.config={CONFIG}"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_tier_is_measured_beside_the_raw_drive_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, _ = bench(capsys, "tier", "--dir", str(tmp_path), "--gib", "0.04", "--rounds", "2", "--json")
    assert status == 0
    report = json.loads(out)["tier"]
    assert report["layers"] == 4 and report["zarr_shards_equal"] == 16
    for name in ("store_state", "load_state", "load_weights"):
        assert report[name]["gbps"] > 0 and report[name]["raw_gbps"] > 0 and report[name]["of_raw"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["megatrain-scratch.lock"]
    status, out, _ = bench(capsys, "tier", "--dir", str(tmp_path), "--gib", "0.04", "--rounds", "1")
    assert "plain zarr reads the same values from all 16 shards" in out


def test_another_size_than_was_asked_for_is_told_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("tier", "--dir", str(tmp_path), "--rounds", "1", "--json", "--gib")
    assert "note" not in bench(capsys, *arguments, "0.03")[2]
    more = bench(capsys, *arguments, "3")[2]
    assert "not 3.00 GiB (--gib): the model has 4 layers" in more
    fewer = bench(capsys, *arguments, "0.001")[2]
    assert "2 layers are the fewest" in fewer
    assert "(--gib): the model has 4 layers" in bench(capsys, "optimizer", "--seconds", "0.05", "--json")[2]


def test_a_model_of_one_layer_has_no_tier_to_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = CONFIG.replace("num_hidden_layers=4", "num_hidden_layers=1")
    status = main(["tier", "--dir", str(tmp_path), "--set", f"model.config={config}"])
    assert status == 2 and "the model has 1 decoder layers, at least 2" in capsys.readouterr().err


def test_a_tier_without_a_directory_is_refused_with_what_to_give(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench(capsys, "tier")[0] == 2
    status, _, err = bench(capsys, "tier", "--dir", str(tmp_path / "none"))
    assert status == 2 and "does not exist" in err


def test_the_optimizer_pool_is_measured_for_every_mixture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.bench.__main__.usable_cores", lambda: 3)
    status, out, _ = bench(capsys, "optimizer", "--gib", "0.02", "--seconds", "0.05", "--json")
    assert status == 0
    rates = json.loads(out)["optimizer"]["rates"]
    assert [(rate["actors"], rate["threads"]) for rate in rates] == [(1, 1), (1, 2), (2, 1)]
    assert all(rate["gparams_per_s"] > 0 and rate["gbps"] > rate["gparams_per_s"] for rate in rates)


def test_mixtures_never_take_more_threads_than_cores_that_are_free() -> None:
    for cores in (1, 2, 3, 16, 64):
        found = mixtures(cores)
        assert (1, 1) in found and len(set(found)) == len(found)
        assert max(actors * threads for actors, threads in found) == max(1, cores - 1)
