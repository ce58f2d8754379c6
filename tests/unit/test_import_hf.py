"""An imported store holds the source bit by bit, takes the memory of one layer, and appears whole or not at all."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.families import load_model_spec, model_layout
from pipeline.recipe import recipe_toml
from tasks import export_hf, import_hf, inspect
from tasks.model_import import one_layer_plan
from tasks.model_source import check_source, imported_checkpoint
from tasks.stored_model import StoredModel
from tests.support.tiny import tiny_config
from tiers.arena_map import ArenaMap
from tiers.checkpoint import newest_complete
from tiers.errors import CheckpointError
from tiers.layout import Precision
from tiers.manifest import verify


def make_source(
    directory: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Write a model of random weights as Hugging Face does."""
    directory.mkdir()
    named = config | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(named))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("not part of the model")
    generator = torch.Generator().manual_seed(3)
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(dtype)
        for layer in model_layout(load_model_spec(config, Precision.BF16)).layers
        for tensor in layer.tensors
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "bf16"), (torch.float32, "fp32")]
)
def test_import_then_export_gives_every_bit_back_without_the_source(
    tmp_path: Path, dtype: torch.dtype, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store, out = tmp_path / "source", tmp_path / "deep" / "store", tmp_path / "out"
    tensors = make_source(source, tiny_config("qwen3", tied=True), dtype)
    assert import_hf.main([str(source), str(store), "--precision", precision]) == 0
    assert f'source = "{store}"' in capsys.readouterr().out
    shutil.rmtree(source)
    assert inspect.main([str(store), "--verify"]) == 0
    assert "0 (0 applied, 0 skipped)" in capsys.readouterr().out
    assert export_hf.main([str(store), str(out)]) == 0
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, values in tensors.items():
        assert exported[name].dtype == dtype
        assert torch.equal(exported[name].view(torch.uint8), values.view(torch.uint8)), name
    assert (out / "tokenizer.json").exists()
    assert sorted(path.name for path in store.iterdir()) == ["checkpoints", "config.json", "tokenizer.json"]


def test_the_store_is_a_complete_checkpoint_of_step_0_that_a_recipe_may_name(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    make_source(source, tiny_config("llama"))
    assert import_hf.main([str(source), str(store)]) == 0
    checkpoint = imported_checkpoint(store)
    assert checkpoint is not None and newest_complete(store) == (checkpoint, ())
    assert verify(checkpoint, deep=True) == []
    assert str(store) in recipe_toml(StoredModel.open(store).recipe())
    assert imported_checkpoint(source) is None
    model = model_layout(load_model_spec(store, Precision.BF16))
    check_source(store, model, tmp_path / "run")
    with pytest.raises(CheckpointError, match="directory of its own"):
        check_source(store, model, store)
    with pytest.raises(CheckpointError, match="--precision fp32"):
        check_source(store, model_layout(load_model_spec(store, Precision.FP32)), tmp_path / "run")
    next(checkpoint.rglob("c/0")).unlink()
    with pytest.raises(CheckpointError, match="import the model again"):
        check_source(store, model, tmp_path / "run")


def test_memory_is_that_of_the_largest_layer_however_deep_the_model() -> None:
    sizes = []
    for layers in (2, 40):
        model = model_layout(load_model_spec(tiny_config("llama", num_hidden_layers=layers), Precision.BF16))
        sizes.append(ArenaMap.of(one_layer_plan(model)).total_bytes)
        assert sizes[-1] <= 18 * max(layer.numel for layer in model.layers) + 6 * 4096
    assert sizes[0] == sizes[1]


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = tmp_path / "source", tmp_path / "a" / "store"
    make_source(source, tiny_config("llama"))
    (tmp_path / "a-folder-of-other-things").mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refused(*arguments: str) -> str:
        assert import_hf.main(list(arguments)) == 2
        message = capsys.readouterr().err
        assert message.startswith("import_hf: refused: ") and message.count("\n") == 1
        return message

    assert "not an empty directory" in refused(str(source), str(source))
    assert "no such directory" in refused(str(tmp_path / "nothing"), str(store))
    assert "no config.json" in refused(str(tmp_path / "a-folder-of-other-things"), str(store))
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in refused(str(source), str(store))
    weights.write_bytes(whole)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    assert "model.layers.5" in refused(str(source), str(store))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fault_on_the_way_removes_what_was_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    make_source(source, tiny_config("llama"))
    # A file size limit is the fault that needs no privileges and comes from the kernel itself.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        status = import_hf.main([str(source), str(store)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert status == 2
    assert capsys.readouterr().err.startswith("import_hf: refused: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
