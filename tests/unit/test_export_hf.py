"""An exported model is the trained one: transformers computes the same from it, and its files say what they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.families import load_model_spec, model_layout
from tasks import export_hf, inspect
from tasks.hf_directory import ExportSettings, export, plan_shards
from tasks.stored_model import StoredModel
from tests.support.saved_runs import save_run
from tests.support.tiny import tiny_config
from tiers.layout import Buffer, Precision
from tiers.master import split_master
from tiers.shards import shard_path

SaveRun = Callable[..., Path]
Weights = dict[str, torch.Tensor]


def tensors_of(directory: Path) -> Weights:
    held = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return held


@pytest.mark.parametrize("precision", list(Precision))
def test_transformers_loads_the_fp32_master_bit_by_bit(tmp_path: Path, precision: Precision) -> None:
    weights = save_run(tmp_path / "run", tiny_config("qwen3"), precision)
    out = export(StoredModel.open(tmp_path / "run"), tmp_path / "out", ExportSettings("fp32")).directory
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert (out / "config.json").stat().st_mode & 0o777 == 0o644


def test_the_type_is_the_sources_unless_asked_otherwise_and_the_config_says_it(tmp_path: Path) -> None:
    config = tiny_config("llama")
    save_run(tmp_path / "run", config | {"torch_dtype": "float16"}, Precision.BF16)
    model = StoredModel.open(tmp_path / "run")
    save_run(tmp_path / "random", config, Precision.BF16)
    random = StoredModel.open(tmp_path / "random")
    for opened, asked, expected in (
        (model, "source", torch.float16),
        (random, "source", torch.bfloat16),
        (random, "bf16", torch.bfloat16),
        (random, "fp32", torch.float32),
    ):
        out = export(opened, tmp_path / f"{expected}-{asked}-{opened is model}", ExportSettings(asked)).directory
        assert {tensor.dtype for tensor in tensors_of(out).values()} == {expected}
        assert AutoConfig.from_pretrained(out).dtype == expected
        assert AutoConfig.from_pretrained(out).architectures == ["LlamaForCausalLM"]


def test_bf16_is_what_the_model_computed_with(tmp_path: Path) -> None:
    weights = save_run(tmp_path / "run", tiny_config("llama"), Precision.BF16)
    held = tensors_of(export(StoredModel.open(tmp_path / "run"), tmp_path / "out", ExportSettings()).directory)
    for name, values in weights.items():
        high = np.empty(values.shape, np.uint16)
        split_master(values.numpy(), high, np.empty(values.shape, np.int16))
        assert np.array_equal(held[name].view(torch.uint16).numpy(), high), name


def test_a_tied_model_has_one_matrix_unless_untied(tmp_path: Path) -> None:
    weights = save_run(tmp_path / "run", tiny_config("qwen2", tied=True), Precision.FP32)
    model = StoredModel.open(tmp_path / "run")
    tied, untied = (
        export(model, tmp_path / "a", ExportSettings()).directory,
        export(model, tmp_path / "b", ExportSettings(untie=True)).directory,
    )
    assert "lm_head.weight" not in tensors_of(tied)
    assert torch.equal(tensors_of(untied)["lm_head.weight"], weights["model.embed_tokens.weight"])
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(out)(ids).logits for out in (tied, untied)]
    assert torch.equal(*logits)
    assert [AutoConfig.from_pretrained(out).tie_word_embeddings for out in (tied, untied)] == [True, False]


def test_many_shards_make_an_index_and_load_alike(tmp_path: Path) -> None:
    weights = save_run(tmp_path / "run", tiny_config("mistral"), Precision.FP32)
    out = export(StoredModel.open(tmp_path / "run"), tmp_path / "out", ExportSettings(shard_bytes=30_000)).directory
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3 and files == {path.name for path in out.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in weights.values())
    state = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_shards_keep_order_and_size_and_a_large_tensor_stands_alone() -> None:
    assert plan_shards({"a": 4, "b": 4, "c": 20, "d": 1, "e": 9}, 10) == [["a", "b"], ["c"], ["d", "e"]]


COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "generation_config.json")


def source_with_companions(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(tiny_config("llama") | {"vocab_size": 300, "eos_token_id": 2}))
    for name in (*COMPANIONS, "notes.md"):
        (source / name).write_text(f"{{}} {name}")
    return source


def test_tokenizer_and_generation_files_come_along(tmp_path: Path) -> None:
    """Also with the default `data.tokenizer`, which rows of token ids do not use: their ids are the source's."""
    source = source_with_companions(tmp_path)
    save_run(tmp_path / "run", {}, Precision.BF16, source=source)
    written = export(StoredModel.open(tmp_path / "run"), tmp_path / "out", ExportSettings())
    copied = {
        path.name: path.read_text() for path in written.directory.iterdir() if path.read_bytes().startswith(b"{} ")
    }
    assert copied == {name: f"{{}} {name}" for name in COMPANIONS}
    assert written.tokenizer == f"that of {source}"
    assert json.loads((written.directory / "config.json").read_text())["eos_token_id"] == 2


def test_a_model_of_bytes_takes_no_tokenizer_of_its_source_and_ends_documents_with_256(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_with_companions(tmp_path)
    save_run(tmp_path / "run", {}, Precision.BF16, source=source, bytes_tokenised=True)
    out = tmp_path / "out"
    assert export_hf.main([str(tmp_path / "run"), str(out)]) == 0
    assert "tokenizer: none: the model reads bytes" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.generation_config.eos_token_id == 256
    load_model_spec(out, Precision.BF16)


def test_a_tokenizer_that_is_gone_is_refused_unless_the_model_reads_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, tokenizer, out = source_with_companions(tmp_path), tmp_path / "tokenizer", tmp_path / "out"
    for name, facts in (("run", {}), ("of-bytes", {"bytes_tokenised": True})):
        save_run(tmp_path / name, {}, Precision.BF16, source=source, tokenizer=tokenizer, **facts)
    assert export_hf.main([str(tmp_path / "run"), str(out)]) == 2
    assert f"the tokenizer {tokenizer} that the recipe names is gone; put it" in capsys.readouterr().err
    assert not out.exists()
    assert export_hf.main([str(tmp_path / "of-bytes"), str(tmp_path / "out-of-bytes")]) == 0
    tokenizer.mkdir()
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "without")]) == 0
    assert f"tokenizer: none: {tokenizer} has none" in capsys.readouterr().out
    (tokenizer / "tekken.json").write_text("{}")
    assert export_hf.main([str(tmp_path / "run"), str(out)]) == 0
    assert f"tokenizer: that of {tokenizer}" in capsys.readouterr().out and (out / "tekken.json").exists()


def test_nothing_is_overwritten_and_damage_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run, tiny_config("llama"), Precision.BF16)
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert export_hf.main([str(run), str(out)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert export_hf.main([str(run), str(out / "mine.txt" / "deeper")]) == 2
    assert "deeper cannot be made" in capsys.readouterr().err
    model = StoredModel.open(run)
    with (model.directory / shard_path(_layers(run)[1], Buffer.WEIGHT)).open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff\xff")
    assert export_hf.main([str(run), str(tmp_path / "new")]) == 2
    assert "model.layers.0" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert inspect.main([str(run), "--verify"]) == 1
    assert "damaged" in capsys.readouterr().out


def test_new_parents_of_an_export_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path / "run", tiny_config("llama"), Precision.BF16)
    synced: set[Path] = set()
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    export(StoredModel.open(tmp_path / "run"), tmp_path / "new" / "newer" / "out", ExportSettings())
    for parent in ("", "new", "new/newer"):
        assert tmp_path / parent in synced, f"the entry in {parent or 'the old directory'} may be lost"


@pytest.mark.parametrize(("spare_bytes", "status"), [(1 << 20, 0), (-1, 2)])
def test_an_export_asks_for_the_room_that_it_takes(
    spare_bytes: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few hundred KiB for a tiny model, not the tokenizer of a large one."""
    save_run(tmp_path / "run", tiny_config("llama"), Precision.BF16)
    out = export(StoredModel.open(tmp_path / "run"), tmp_path / "first", ExportSettings()).directory
    taken = sum(path.stat().st_size for path in out.iterdir())
    total, used, _ = shutil.disk_usage(tmp_path)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(total, used, taken + spare_bytes))
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "new" / "out")]) == status
    assert (tmp_path / "new").exists() == (status == 0), "nothing is made where there is no room"


def _layers(run: Path) -> tuple[Any, ...]:
    return model_layout(load_model_spec(tiny_config("llama"), Precision.BF16)).layers
