"""An evaluation measures exactly the sequences that the recipe asks for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.recipe import Recipe, parse_recipe
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.evaluation import evaluation
from tasks.preparation import data_settings

SEQUENCES = 11


def recipe(tmp_path: Path, sequences: str) -> Recipe:
    text = f"""
    run = {{ name = "r", dir = "{tmp_path}/run" }}
    model.config = {{ model_type = "llama" }}
    data = {{ path = "{tmp_path}/data.parquet", eval_path = "{tmp_path}/data.parquet" }}
    train = {{ steps = 1, sequence_length = 4, sequences_per_step = 8, micro_batch = 2 }}
    {f"eval.sequences = {sequences}" if sequences else ""}
    """
    return parse_recipe(text, "recipe")


@pytest.fixture
def held_out(tmp_path: Path) -> PackedDataset:
    rows = [[10 * row + position for position in range(4)] for row in range(SEQUENCES)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "data.parquet")
    _, settings = data_settings(recipe(tmp_path, ""))
    assert settings is not None
    return open_dataset(settings, sequence_length=4, seed=0, vocab_size=200, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("asked", "measured"),
    [("1", 1), ("2", 2), ("7", 7), ("9", 9), ("11", 11), ("12", 11), ("1000000000", 11), ("", 11)],
)
@pytest.mark.parametrize("waves", [1, 3])
def test_as_many_sequences_are_measured_as_are_asked_for(
    tmp_path: Path, held_out: PackedDataset, asked: str, measured: int, waves: int
) -> None:
    make = evaluation(recipe(tmp_path, asked), held_out, waves)
    assert make is not None
    batches = list(make())
    # Four tokens of a document have three targets; what fills the last micro-batch has none.
    assert sum(batch.supervised_tokens for batch in batches) == 3 * measured
    assert all(batch.input_ids.shape[0] <= (4 if waves == 1 else 1) for batch in batches)
    again = list(make())
    assert [batch.input_ids.tolist() for batch in again] == [batch.input_ids.tolist() for batch in batches]


def test_nothing_held_out_is_nothing_to_measure(tmp_path: Path) -> None:
    assert evaluation(recipe(tmp_path, ""), None, 1) is None
