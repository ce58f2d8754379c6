"""Thousands of damaged and nonsensical inputs: each is read or refused with a documented error, none is changed.

Inputs are mutations of valid ones: bits, bytes and lengths of files, values and keys of documents. The seeds are fixed;
MEGATRAIN_SOAK=1 tries many more and new ones.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from pipeline.errors import UnsupportedModelError
from pipeline.families import load_model_spec
from pipeline.recipe import RecipeError, load_recipe, recipe_toml
from tasks.data.settings import DataError, DataSettings
from tasks.data.tokenise import tokenise
from tasks.stored_model import StoredModel
from tests.support.stores import random_arrays, saved_facts, small_model, write_layer
from tiers import checkpoint
from tiers.checkpoint import newest_complete
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError, ShardError, TierError
from tiers.layout import Precision, stored_buffers
from tiers.manifest import MANIFEST_NAME, verify
from tiers.preflight import preflight
from tiers.safetensors_header import read_header
from tiers.shard_store import ShardStore
from tiers.store_metadata import check_layer_metadata

SOAK = bool(os.environ.get("MEGATRAIN_SOAK"))


def tries(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=number * (20 if SOAK else 1),
        deadline=None,
        derandomize=not SOAK,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "nan", "../../etc/passwd", "/", "\0", "a" * 300, "bf16", "1e999", "-1", "\ud800"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few bytes changed, removed, repeated, or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "remove", "number"])):
            case "flip" if content:
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "set" if content:
                content[place] = draw(st.integers(0, 255))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = draw(st.binary(max_size=9))
            case "remove":
                del content[place : place + draw(st.integers(1, 16))]
            case "number":
                content[place : place + 8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1)))
    return bytes(content)


@st.composite
def damaged_document(draw: st.DrawFn, whole: Any) -> Any:
    """`whole` (tables and lists) with a few of its values replaced, keys removed or added."""
    document = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and draw(st.booleans()):
                node = node[key]
                continue
            match draw(st.sampled_from(["replace", "replace", "remove", "rename"])):
                case "replace":
                    node[key] = draw(JSON_VALUES)
                case "remove":
                    del node[key]
                case "rename" if isinstance(node, dict):
                    node[draw(st.text(max_size=8))] = node.pop(key)
            break
    return document


def unchanged(path: Path, content: bytes) -> None:
    assert path.read_bytes() == content, f"{path} was changed by reading it"


@pytest.fixture(scope="module")
def valid_recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import tomllib

    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_text(
        '[model.config]\nmodel_type = "llama"\n[data]\npath = "x"\n[train]\nsteps = 5\nsequence_length = 8\n'
        "sequences_per_step = 4\n"
    )
    return tomllib.loads(recipe_toml(load_recipe(path)))


@tries(500)
@given(data=st.data())
def test_recipes_are_read_or_refused(tmp_path: Path, valid_recipe: dict[str, Any], data: st.DataObject) -> None:
    path = tmp_path / "recipe.toml"
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(tomli_w.dumps(valid_recipe).encode()))
    else:
        try:
            content = tomli_w.dumps(data.draw(damaged_document(valid_recipe))).encode()
        except (TypeError, UnicodeEncodeError):
            return  # TOML cannot say it
    path.write_bytes(content)
    overrides = data.draw(st.lists(st.text(max_size=20) | st.just("train.steps=3"), max_size=2))
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        assert str(path) in str(error) or "--set" in str(error)
    else:
        assert recipe_toml(recipe)
    unchanged(path, content)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@tries(300)
@given(config=damaged_document(CONFIG))
def test_model_configurations_are_read_or_refused(config: dict[str, Any]) -> None:
    try:
        load_model_spec(config, Precision.FP32)
    except UnsupportedModelError as error:
        assert str(error)


TENSORS = save({"a.weight": np.zeros((3, 4), np.float32), "b": np.ones(7, np.float16)})


@tries(500)
@given(data=st.data())
def test_safetensors_files_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(TENSORS))
    else:
        length = struct.unpack("<Q", TENSORS[:8])[0]
        header = data.draw(damaged_document(json.loads(TENSORS[8 : 8 + length])))
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        content = struct.pack("<Q", len(text)) + text + TENSORS[8 + length :]
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except ShardError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(tensor.offset_bytes + tensor.num_bytes <= len(content) for tensor in tensors)
    unchanged(path, content)


def parquet_bytes(compression: str) -> bytes:
    sink = pa.BufferOutputStream()
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]] * 20
    pq.write_table(pa.table({"input_ids": pa.array(rows)}), sink, compression=compression, row_group_size=16)
    return bytes(sink.getvalue())


PARQUET = [parquet_bytes("none"), parquet_bytes("zstd")]


@tries(300)
@given(content=st.sampled_from(PARQUET).flatmap(damaged_bytes))
def test_parquet_files_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        path.write_bytes(content)
        try:
            cache = tokenise(DataSettings(paths=(path,)), vocab_size=300, cache_dir=Path(folder) / "cache")
        except DataError as error:
            assert "rows.parquet" in str(error)
        else:
            assert cache.tokens.size == 0 or int(cache.tokens.max()) < 300
        unchanged(path, content)


MODEL = small_model(Precision.FP32, layers=1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with DirectIO(requests=1) as io:
        for step in (1, 2):
            writer = checkpoint.begin(folder, step, MODEL)
            store = ShardStore(writer.directory, MODEL, io, preflight(writer.directory))
            records = [
                record for layer in MODEL.layers for record in write_layer(store, layer, random_arrays(MODEL, layer, 1))
            ]
            writer.publish(records, saved_facts(MODEL, step))
    return folder


def some_damage(data: st.DataObject, whole: bytes) -> bytes:
    if data.draw(st.booleans()):
        return data.draw(damaged_bytes(whole))
    return json.dumps(data.draw(damaged_document(json.loads(whole)))).encode("utf-8", "surrogatepass")


@tries(300)
@given(data=st.data())
def test_a_damaged_manifest_is_passed_over_or_refused(run_dir: Path, data: st.DataObject) -> None:
    path = run_dir / "checkpoints" / "step-000002" / MANIFEST_NAME
    whole = path.read_bytes()
    # Without the sum of itself, as earlier versions wrote it: what is damaged then reaches every check behind the sum.
    unsummed = b"{\n" + whole.partition(b"\n")[2]
    content = some_damage(data, data.draw(st.sampled_from([whole, unsummed])))
    path.write_bytes(content)
    try:
        newest, skipped = newest_complete(run_dir)
        assert newest is not None and (newest.name == "step-000002" or skipped[0].path == path.parent)
        verify(path.parent, deep=True)
        with contextlib.suppress(CheckpointError, RecipeError):
            StoredModel.open(path.parent).recipe()
        unchanged(path, content)
    finally:
        path.write_bytes(whole)


@tries(300)
@given(data=st.data())
def test_damaged_zarr_metadata_is_refused(run_dir: Path, data: st.DataObject) -> None:
    directory = run_dir / "checkpoints" / "step-000002"
    path = data.draw(st.sampled_from(sorted(directory.rglob("zarr.json"))))
    whole = path.read_bytes()
    content = some_damage(data, whole)
    path.write_bytes(content)
    try:
        assert content == whole or verify(directory, deep=True)
        for layer in MODEL.layers:
            try:
                check_layer_metadata(directory, layer, MODEL.precision, stored_buffers(MODEL.precision))
            except ShardError as error:
                assert "zarr.json" in str(error)
        try:
            StoredModel.open(directory)
        except TierError as error:
            assert str(directory) in str(error)
        unchanged(path, content)
    finally:
        path.write_bytes(whole)
