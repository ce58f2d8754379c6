"""A described machine decides in `tasks.train` what the plan chooses by time, and its step is shown before a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.prediction.assumed_hardware import CPU
from pipeline.prediction.hardware import hardware_toml
from support.small_recipe import write_one_step
from tasks import train

SETTINGS = ("train.sequence_length=64", "train.sequences_per_step=16", "memory.gpu_gib=0.01")
"""Large micro-batches leave no room for a layer that is not recomputed."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_one_step(tmp_path, words=800)


def dry_run(recipe: Path, hardware: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    overrides = [argument for setting in SETTINGS for argument in ("--set", setting)]
    assert train.main((str(recipe), "--dry-run", "--hardware", str(hardware), *overrides)) == 0
    return capsys.readouterr().out


def test_the_micro_batch_and_the_step_follow_the_machine(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for name, pass_s in (("quick", 0.0), ("slow to launch", 10.0)):
        path = recipe.with_name(f"{name}.toml")
        device = replace(CPU.device, pass_s=pass_s, product_tail=0.0)
        path.write_text(hardware_toml(replace(CPU, name=name, device=device)))
        said[name] = dry_run(recipe, path, capsys)
        assert f"by the rates of {name}; bottleneck: compute" in said[name]
    assert "micro_batch = 16\n" in said["slow to launch"]
    assert "micro_batch = 8\n" in said["quick"]


def test_a_shipped_machine_is_known_by_name_and_an_unknown_file_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "by the rates of H200 + 125 GiB (measured)" in dry_run(recipe, "h200-measured", capsys)
    assert train.main((str(recipe), "--hardware", "missing.toml")) == 2
    assert "missing.toml: no such hardware file; `tasks.probe --out FILE` makes one" in capsys.readouterr().err
    assert not recipe.with_name("run").exists()
