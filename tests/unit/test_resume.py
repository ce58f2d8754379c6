"""Where a run goes on is checked against the data that it was trained on."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.messages import IGNORED
from pipeline.recipe import Recipe, parse_recipe, recipe_toml
from tasks.checkpointing import Progress
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.preparation import data_settings
from tasks.resume import ResumeError, ResumePoint, check_data, find_resume_point, keep_micro_batch
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


def test_an_open_micro_batch_is_that_of_the_checkpoint_and_another_is_a_change(tmp_path: Path) -> None:
    wanted = of_sequences(recipe(tmp_path), 12)
    checkpoint = tmp_path / "run/checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    facts = Facts(
        step=1,
        applied_steps=1,
        skipped_steps=0,
        data_position=SavedPosition(epoch=0, sequence=12),
        seed=0,
        recipe=recipe_toml(wanted.with_micro_batch(4)),
        libraries={},
        precision=Precision.BF16,
        num_parameters=1,
    )
    write_manifest(checkpoint, Manifest(created=datetime.datetime.now(datetime.UTC), facts=facts, files=()))
    assert find_resume_point(wanted, print) is not None
    assert keep_micro_batch(wanted, checkpoint).train.micro_batch == 4
    assert keep_micro_batch(wanted.with_micro_batch(6), checkpoint).train.micro_batch == 6
    assert keep_micro_batch(of_sequences(wanted, 10), checkpoint).train.micro_batch == "auto", "4 does not divide 10"
    with pytest.raises(ResumeError, match=r"train\.micro_batch: 4 -> 6"):
        find_resume_point(wanted.with_micro_batch(6), print)
