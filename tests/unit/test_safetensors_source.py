"""Importing real safetensors files: every value arrives, and whatever is wrong with a directory is said first."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.masters import master_of
from tiers import safetensors_source
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.errors import ImportedTensorError, ShardError
from tiers.layout import (
    ElementType,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    place_tensors,
)
from tiers.master import LayerState
from tiers.safetensors_source import SafetensorsSource

EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SHAPES: dict[str, tuple[int, ...]] = {EMBEDDING: (40, 8), UP: (16, 8), NORM: (8,), HEAD: (40, 8)}

Tensors = dict[str, torch.Tensor]


def model_layout(*, tied: bool = False, precision: Precision = Precision.BF16) -> ModelLayout:
    def layer(index: int, kind: LayerKind, *names: str) -> LayerLayout:
        specs = [TensorSpec(name, SHAPES[name], 0, True, InitKind.NORMAL, 0.02) for name in names]
        return LayerLayout(index, f"layer-{index}", kind, *place_tensors(specs))

    layers = (
        layer(0, LayerKind.EMBEDDING, EMBEDDING),
        layer(1, LayerKind.DECODER, UP),
        layer(2, LayerKind.HEAD, *((NORM,) if tied else (NORM, HEAD))),
    )
    return ModelLayout(layers, precision, tied)


def random_tensors(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    names = [name for name in SHAPES if not (tied and name == HEAD)]
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


def write_single(directory: Path, tensors: Tensors) -> Path:
    path = directory / "model.safetensors"
    save_file(tensors, path)
    return path


def write_sharded(directory: Path, tensors: Tensors) -> list[Path]:
    """Two shards and their index."""
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    weight_map = {name: file_name for file_name, held in shards.items() for name in held}
    for file_name, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file_name)
    write_index(directory, weight_map)
    return [directory / file_name for file_name in shards]


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@contextmanager
def loaded(directory: Path, model: ModelLayout) -> Iterator[dict[str, np.ndarray]]:
    """Read every layer over an arena full of rubbish; yield each tensor's fp32 master."""
    source = SafetensorsSource(directory, model)
    arena_map = ArenaMap.of(TierPlan(model, (LayerHome(),) * len(model.layers), ElementType.FLOAT32))
    masters = {}
    with Arena.create(arena_map.total_bytes, threads=1) as arena:
        arena.bytes_view(0, arena.num_bytes)[:] = 0xEE
        for layer in model.layers:
            source.read_layer_into(arena, arena_map, layer)
            state = LayerState.of(arena, arena_map, layer)
            values = master_of(state)
            for tensor in layer.tensors:
                part = slice(tensor.offset, tensor.offset + tensor.numel)
                masters[tensor.name] = values[part].reshape(tensor.shape).copy()
                values[part] = 0
            assert not values.any() and not any(moment.any() for moment in state.moments)
        yield masters


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_every_value_arrives_exactly(
    tmp_path: Path, write: Callable[[Path, Tensors], object], dtype: torch.dtype, precision: Precision
) -> None:
    tensors = random_tensors(dtype)
    write(tmp_path, tensors)
    with loaded(tmp_path, model_layout(precision=precision)) as masters:
        for name, tensor in tensors.items():
            assert np.array_equal(masters[name], tensor.float().numpy()), name


def test_tensors_larger_than_a_block_arrive_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_source, "BLOCK_ELEMENTS", 7)
    tensors = random_tensors(torch.float32)
    write_single(tmp_path, tensors)
    with loaded(tmp_path, model_layout()) as masters:
        for name, tensor in tensors.items():
            assert np.array_equal(masters[name], tensor.numpy()), name


def test_special_values_survive(tmp_path: Path) -> None:
    tensors = random_tensors(torch.float32)
    tensors[NORM] = torch.tensor([0.0, -0.0, 1e-45, -1e-40, float("inf"), -float("inf"), float("nan"), 3.4e38])
    write_single(tmp_path, tensors)
    with loaded(tmp_path, model_layout()) as masters:
        assert np.array_equal(masters[NORM].view(np.int32), tensors[NORM].numpy().view(np.int32))


def test_a_hub_cache_of_symbolic_links_is_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_single(tmp_path / "blobs", random_tensors()).rename(tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    SafetensorsSource(tmp_path / "snapshot", model_layout())


def test_a_source_pickles(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    pickle.loads(pickle.dumps(SafetensorsSource(tmp_path, model_layout())))


# Files that are missing or should not be there.


def test_missing_shards_are_listed_before_anything_is_read(tmp_path: Path) -> None:
    first, second = write_sharded(tmp_path, random_tensors())
    second.unlink()
    first.write_bytes(b"not even looked at")
    with pytest.raises(ShardError, match=r"lists 2 files, 1 are missing: model-00002-of-00002\.safetensors"):
        SafetensorsSource(tmp_path, model_layout())


def test_an_index_of_only_some_shards_lacks_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sharded(tmp_path, random_tensors())
    write_index(tmp_path, dict.fromkeys([EMBEDDING, UP], "model-00001-of-00002.safetensors"))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ImportedTensorError, match=r"lacks 2 of the model's 4 tensors: model\.norm\.weight"),
    ):
        SafetensorsSource(tmp_path, model_layout())
    assert "model-00002-of-00002.safetensors" in caplog.text


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, random_tensors())
    names = {
        name: f"model-0000{number}-of-00002.safetensors" for name, number in zip(SHAPES, (1, 2, 2, 2), strict=True)
    }
    write_index(tmp_path, names)
    with pytest.raises(ShardError, match=r"not where it says: model\.layers\.0\.mlp\.up_proj\.weight in model-00002"):
        SafetensorsSource(tmp_path, model_layout())


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    _, second = write_sharded(tmp_path, tensors)
    save_file({name: tensors[name] for name in (NORM, HEAD, UP)}, second)
    with pytest.raises(ImportedTensorError, match="is in two files"):
        SafetensorsSource(tmp_path, model_layout())


def test_a_single_file_is_preferred_to_an_index_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_single(tmp_path, random_tensors())
    write_index(tmp_path, dict.fromkeys(SHAPES, "absent.safetensors"))
    with caplog.at_level(logging.WARNING):
        SafetensorsSource(tmp_path, model_layout())
    assert "the index is not read" in caplog.text


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a/../../model.safetensors", ""])
def test_an_index_cannot_name_files_outside_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    write_single(tmp_path, random_tensors())
    write_index(tmp_path / "model", dict.fromkeys(SHAPES, name))
    with pytest.raises(ShardError, match="outside its directory; refused"):
        SafetensorsSource(tmp_path / "model", model_layout())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "version https"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ShardError, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path, model_layout())


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ShardError, match=r"pytorch_model\.bin, which could run code .* never opened"):
        SafetensorsSource(tmp_path, model_layout())
    write_index(tmp_path, dict.fromkeys(SHAPES, "pytorch_model.bin"))
    with pytest.raises(ShardError, match=r"only \.safetensors files are read"):
        SafetensorsSource(tmp_path, model_layout())
    assert not (tmp_path / "exploded").exists()


def test_shards_without_an_index_an_empty_directory_and_none_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="found no files"):
        SafetensorsSource(tmp_path, model_layout())
    write_sharded(tmp_path, random_tensors())
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ShardError, match="is the index missing"):
        SafetensorsSource(tmp_path, model_layout())
    with pytest.raises(ShardError, match="not a directory"):
        SafetensorsSource(tmp_path / "absent", model_layout())


# Files that are damaged.


def refusal(directory: Path) -> str:
    with pytest.raises(ShardError) as caught:
        SafetensorsSource(directory, model_layout())
    message = str(caught.value)
    assert "\n" not in message and str(directory / "model.safetensors") in message
    return message


@pytest.mark.parametrize("removed", [1, 100])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path, removed: int) -> None:
    path = write_single(tmp_path, random_tensors())
    content = path.read_bytes()
    path.write_bytes(content[:-removed])
    assert f"truncated: expected {len(content)} bytes, found {len(content) - removed}" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 5])
def test_an_empty_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_single(tmp_path, random_tensors())
    path.write_bytes(path.read_bytes()[:kept])
    assert f"expected at least 8 bytes, found {kept}" in refusal(tmp_path)


def test_a_file_cut_in_its_header_is_refused(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    path.write_bytes(path.read_bytes()[:50])
    assert "found 50 in all" in refusal(tmp_path)


def test_trailing_bytes_are_refused_with_both_sizes(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(8))
    assert f"trailing bytes: expected {size} bytes, found {size + 8}" in refusal(tmp_path)


def test_a_git_lfs_pointer_is_refused_with_the_size_it_points_to(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4943162336\n"
    (tmp_path / "model.safetensors").write_text(text)
    message = refusal(tmp_path)
    assert f"expected 4943162336 bytes, found {len(text)}" in message and "git lfs pull" in message


@pytest.mark.parametrize("text", ["<!DOCTYPE html><html>Not found</html>", "\n <html></html>", "<?xml version='1.0'?>"])
def test_a_page_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_text(text)
    assert f"found {len(text)} bytes of text" in refusal(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2]}}', b"\xff\xfe"])
def test_a_broken_header_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "header" in refusal(tmp_path)


def test_a_header_whose_sizes_disagree_with_its_shapes_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "no valid safetensors file" in refusal(tmp_path)


def test_a_file_that_shrinks_after_it_was_checked_is_noticed(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    model = model_layout()
    source = SafetensorsSource(tmp_path, model)
    path.write_bytes(path.read_bytes()[:600])
    arena_map = ArenaMap.of(TierPlan(model, (LayerHome(),) * 3, ElementType.FLOAT32))
    with Arena.create(arena_map.total_bytes, threads=1) as arena, pytest.raises(ShardError, match="changed after"):
        for layer in model.layers:
            source.read_layer_into(arena, arena_map, layer)


# Tensors that do not fit the model.


@pytest.mark.parametrize("name", [EMBEDDING, UP, HEAD])
def test_a_missing_tensor_is_an_error_and_never_random(tmp_path: Path, name: str) -> None:
    tensors = random_tensors()
    del tensors[name]
    write_single(tmp_path, tensors)
    with pytest.raises(ImportedTensorError, match=f"lacks 1 of the model's 4 tensors: {name}"):
        SafetensorsSource(tmp_path, model_layout())


def test_an_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), "model.layers.1.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(ImportedTensorError, match=r"holds 1 tensors .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        SafetensorsSource(tmp_path, model_layout())


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    SafetensorsSource(tmp_path, model_layout())


def test_a_vocabulary_of_another_size_says_what_to_set(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), EMBEDDING: torch.zeros(48, 8, dtype=torch.bfloat16)})
    with pytest.raises(
        ImportedTensorError, match=r"shape \[48, 8\], config.json asks for \[40, 8\].* vocab_size to 48"
    ):
        SafetensorsSource(tmp_path, model_layout())


def test_another_shape_is_an_error_even_with_as_many_elements(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), UP: torch.zeros(8, 16, dtype=torch.bfloat16)})
    with pytest.raises(ImportedTensorError, match=r"up_proj.* shape \[8, 16\], config.json asks for \[16, 8\]$"):
        SafetensorsSource(tmp_path, model_layout())


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), UP: torch.zeros(16, 8, dtype=torch.int8)})
    with pytest.raises(ImportedTensorError, match="is I8, read are BF16, F16, F32"):
        SafetensorsSource(tmp_path, model_layout())


# Tied heads.


def test_a_tied_model_needs_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_single(tmp_path, random_tensors(tied=True))
    with caplog.at_level(logging.WARNING), loaded(tmp_path, model_layout(tied=True)):
        assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_head_that_equals_the_embedding_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    tensors = random_tensors(tied=True)
    write_single(tmp_path, {**tensors, HEAD: tensors[EMBEDDING].to(dtype, copy=True)})
    with caplog.at_level(logging.WARNING), loaded(tmp_path, model_layout(tied=True)):
        assert not caplog.records


@pytest.mark.parametrize("shape", [(40, 8), (48, 8)])
def test_a_tied_head_that_differs_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: tuple[int, int]
) -> None:
    tensors = random_tensors(tied=True)
    write_single(tmp_path, {**tensors, HEAD: torch.ones(shape, dtype=torch.bfloat16)})
    with caplog.at_level(logging.WARNING), loaded(tmp_path, model_layout(tied=True)) as masters:
        assert np.array_equal(masters[EMBEDDING], tensors[EMBEDDING].float().numpy())
    (record,) = caplog.records
    assert "the embedding is used, the head dropped" in record.getMessage()
