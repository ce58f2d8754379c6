"""Where a run goes on is checked against the data that it was trained on."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.messages import IGNORED
from pipeline.placement import PlacementError
from pipeline.recipe import Recipe, parse_recipe, recipe_toml
from support.tiny import tiny_config
from tasks.checkpointing import Progress
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.preparation import data_settings, prepare
from tasks.resume import (
    ResumeError,
    ResumePoint,
    check_data,
    find_resume_point,
    keep_choices,
    prepare_resumed,
    rounding_changes,
)
from tiers.errors import CheckpointError
from tiers.layout import Precision
from tiers.manifest import Facts, Manifest, SavedPosition, write_manifest

ROWS = [[10, 11, 12, 13], [20, 21, 22, 23]]
THEN = [[IGNORED, 11, IGNORED, 13], [IGNORED, 21, 22, 23]]
NOW = [[IGNORED, IGNORED, 12, 13], [IGNORED, 21, 22, 23]]


def recipe(tmp_path: Path, *accepted: str) -> Recipe:
    text = f"""
    run = {{ name = "r", dir = "{tmp_path}/run", accept_changes = {list(accepted)} }}
    model.config = {{ model_type = "llama" }}
    data.path = "{tmp_path}/data.parquet"
    train = {{ steps = 1, sequence_length = 4, sequences_per_step = 1 }}
    """
    return parse_recipe(text, "recipe")


def dataset(tmp_path: Path, labels: list[list[int]]) -> PackedDataset:
    pq.write_table(pa.table({"input_ids": ROWS, "labels": labels}), tmp_path / "data.parquet")
    settings, _ = data_settings(recipe(tmp_path))
    return open_dataset(settings, sequence_length=4, seed=0, vocab_size=100, cache_dir=tmp_path / "cache")


def trained_on(fingerprint: str, tmp_path: Path) -> ResumePoint:
    return ResumePoint(tmp_path / "run/checkpoints/step-000001", replace(Progress(), step=1), fingerprint)


def test_changed_labels_of_the_same_number_are_refused_and_may_be_accepted(tmp_path: Path) -> None:
    before, data, said = dataset(tmp_path, THEN), dataset(tmp_path, NOW), list[str]()
    resume = trained_on(before.fingerprint, tmp_path)
    with pytest.raises(ResumeError, match="other documents or labels"):
        check_data(recipe(tmp_path), resume, data, said.append)
    check_data(recipe(tmp_path, "data.path"), resume, data, said.append)
    check_data(recipe(tmp_path), trained_on(data.fingerprint, tmp_path), data, said.append)
    assert not said


def test_a_checkpoint_that_knows_nothing_of_labels_goes_on_and_says_so(tmp_path: Path) -> None:
    data, said = dataset(tmp_path, NOW), list[str]()
    check_data(recipe(tmp_path), trained_on(data.fingerprint_without_labels, tmp_path), data, said.append)
    assert len(said) == 1 and "labels" in said[0] and "not checked" in said[0]


def test_an_empty_name_of_the_labels_column_reads_no_labels(tmp_path: Path) -> None:
    dataset(tmp_path, NOW)
    text = f"""
    run = {{ name = "r", dir = "{tmp_path}/run" }}
    model.config = {{ model_type = "llama" }}
    data = {{ path = "{tmp_path}/data.parquet", columns = {{ labels = "" }} }}
    train = {{ steps = 1, sequence_length = 4, sequences_per_step = 1 }}
    """
    settings, _ = data_settings(parse_recipe(text, "recipe"))
    data = open_dataset(settings, sequence_length=4, seed=0, vocab_size=100, cache_dir=tmp_path / "cache")
    assert data.report.supervised_tokens == 6


def of_sequences(recipe_: Recipe, sequences: int) -> Recipe:
    """The recipe with other steps."""
    return recipe_.model_copy(update={"train": recipe_.train.model_copy(update={"sequences_per_step": sequences})})


def checkpoint_of(trained: Recipe, device: str = "") -> Path:
    """A checkpoint that says by which recipe it was trained."""
    checkpoint = trained.run.dir / "checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    facts = Facts(
        step=1,
        applied_steps=1,
        skipped_steps=0,
        data_position=SavedPosition(epoch=0, sequence=12),
        seed=0,
        recipe=recipe_toml(trained),
        device=device,
        libraries={},
        precision=Precision.BF16,
        num_parameters=1,
    )
    write_manifest(checkpoint, Manifest(created=datetime.datetime.now(datetime.UTC), facts=facts, files=()))
    return checkpoint


def test_an_open_micro_batch_is_that_of_the_checkpoint_and_another_is_a_change(tmp_path: Path) -> None:
    wanted = of_sequences(recipe(tmp_path), 12)
    checkpoint = checkpoint_of(wanted.with_micro_batch(4))
    assert find_resume_point(wanted, print) is not None
    assert keep_choices(wanted, checkpoint).train.micro_batch == 4
    assert keep_choices(wanted.with_micro_batch(6), checkpoint).train.micro_batch == 6
    assert keep_choices(of_sequences(wanted, 10), checkpoint).train.micro_batch == "auto", "4 does not divide 10"
    with pytest.raises(ResumeError, match=r"train\.micro_batch: 4 -> 6"):
        find_resume_point(wanted.with_micro_batch(6), print)
    accepting = of_sequences(recipe(tmp_path, "train.micro_batch"), 12)
    assert keep_choices(accepting, checkpoint).train.micro_batch == "auto", "the plan may choose anew"


def test_open_chunks_and_kept_layers_are_those_of_the_checkpoint_and_other_chunks_are_a_change(tmp_path: Path) -> None:
    wanted = recipe(tmp_path).with_micro_batch(1)
    checkpoint = checkpoint_of(wanted.with_memory(mlp_chunk_tokens=0, kept_layers=3))
    kept = keep_choices(wanted, checkpoint).memory
    assert (kept.mlp_chunk_tokens, kept.kept_layers) == (0, 3), "that nothing was chunked is a choice too"
    given = wanted.with_memory(mlp_chunk_tokens=4096, kept_layers=1)
    assert keep_choices(given, checkpoint).memory == given.memory
    with pytest.raises(ResumeError, match=r"memory\.mlp_chunk_tokens: 0 -> 4096"):
        find_resume_point(given, print)
    accepting = recipe(tmp_path, "memory.mlp_chunk_tokens", "memory.kept_layers").with_micro_batch(1)
    assert keep_choices(accepting, checkpoint).memory == accepting.memory
    assert find_resume_point(accepting.with_memory(mlp_chunk_tokens=4096), print) is not None


def test_a_path_in_a_jobs_copy_of_its_working_directory_is_that_of_this_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's place follows from the head and from every file in it."""
    wanted = recipe(tmp_path).with_micro_batch(1)
    copy = Path("/tmp/head/session/runtime_resources/working_dir_files/_ray_pkg_0123456789abcdef")
    data = wanted.data.model_copy(update={"path": (copy / "data.parquet",)})
    checkpoint_of(wanted.model_copy(update={"data": data}))
    monkeypatch.chdir(tmp_path)
    assert find_resume_point(wanted, print) is not None
    monkeypatch.chdir("/")
    with pytest.raises(ResumeError, match=r"data\.path: "):
        find_resume_point(wanted, print)


def test_checkpoints_of_which_none_is_whole_are_no_reason_to_start_anew(tmp_path: Path) -> None:
    wanted = recipe(tmp_path).with_micro_batch(1)
    partial = wanted.run.dir / "checkpoints/step-000001.partial"
    partial.mkdir(parents=True)
    assert find_resume_point(wanted, print) is None, "none was ever complete"
    checkpoint = checkpoint_of(wanted)
    assert find_resume_point(wanted, print) is not None
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r'step-000001: .*manifest.*run\.resume = "never"'):
        find_resume_point(wanted, print)
    anew = wanted.model_copy(update={"run": wanted.run.model_copy(update={"resume": "never"})})
    assert find_resume_point(anew, print) is None


def long_recipe(tmp_path: Path, gpu_gib: float, *accepted: str) -> Recipe:
    """Of one layer whose network holds more of 4,096 tokens than all else."""
    shape = tiny_config("llama", intermediate_size=4096, num_hidden_layers=1)
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in shape.items() if value is not None)
    text = f"""
    run = {{ name = "r", dir = "{tmp_path}/run", accept_changes = {list(accepted)} }}
    model.config = {{ {config} }}
    data.path = "{tmp_path}/data.parquet"
    train = {{ steps = 1, sequence_length = 4096, sequences_per_step = 1, micro_batch = 1, device = "cpu" }}
    memory = {{ gpu_gib = {gpu_gib} }}
    """
    return parse_recipe(text, "recipe")


TIGHT_GIB, ROOMY_GIB = 0.2, 1.0


def test_a_resumed_run_keeps_its_chunks_when_the_device_has_more_room(tmp_path: Path) -> None:
    tight, roomy = (long_recipe(tmp_path, gpu_gib) for gpu_gib in (TIGHT_GIB, ROOMY_GIB))
    first = prepare(tight)
    assert first.compute.mlp_chunk_tokens == first.recipe.memory.mlp_chunk_tokens == 2048
    assert prepare(roomy).compute.mlp_chunk_tokens == 0
    resume = ResumePoint.of(checkpoint_of(first.recipe, first.device))
    said: list[str] = []
    assert prepare_resumed(roomy, resume, said.append).compute.mlp_chunk_tokens == 2048
    assert not said


def test_a_device_without_room_for_what_was_chosen_is_told_how_to_choose_anew(tmp_path: Path) -> None:
    resume = ResumePoint.of(checkpoint_of(prepare(long_recipe(tmp_path, ROOMY_GIB)).recipe))
    with pytest.raises(PlacementError, match=r"memory\.mlp_chunk_tokens = 0\).*accept_changes = \[\"memory\.mlp_chunk"):
        prepare_resumed(long_recipe(tmp_path, TIGHT_GIB), resume, print)
    accepting = long_recipe(tmp_path, TIGHT_GIB, "memory.mlp_chunk_tokens")
    assert prepare_resumed(accepting, resume, print).compute.mlp_chunk_tokens == 2048


def test_another_device_is_told_to_round_otherwise(tmp_path: Path) -> None:
    roomy, said = long_recipe(tmp_path, ROOMY_GIB), list[str]()
    here = prepare(roomy).device
    assert here.startswith("CPU, ")
    resume = ResumePoint.of(checkpoint_of(prepare(roomy).recipe, "NVIDIA H200"))
    prepare_resumed(roomy, resume, said.append)
    assert len(said) == 1 and f"NVIDIA H200 -> {here}" in said[0]


def test_on_cuda_fewer_kept_layers_and_another_compilation_are_told(tmp_path: Path) -> None:
    before = recipe(tmp_path).with_memory(kept_layers=7)
    on_cpu = prepare(long_recipe(tmp_path, ROOMY_GIB))
    fewer = replace(on_cpu, recipe=before.with_memory(kept_layers=5), cuda=True)
    assert rounding_changes(before, fewer) == ["memory.kept_layers: 7 -> 5"]
    uncompiled = before.model_copy(update={"train": before.train.model_copy(update={"compile": False})})
    assert rounding_changes(before, replace(fewer, recipe=uncompiled)) == ["train.compile: true -> false"]
    assert rounding_changes(before, replace(fewer, recipe=before)) == []
    assert rounding_changes(before, replace(fewer, cuda=False)) == [], "the CPU sums alike, and compiles nothing"
    assert rounding_changes(recipe(tmp_path), fewer) == [], "an older checkpoint does not say"
