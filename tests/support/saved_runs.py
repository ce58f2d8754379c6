"""A run directory with a checkpoint of random values, written as a run writes it but without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.families import load_model_spec, model_layout
from pipeline.recipe import parse_recipe
from support.stores import empty_arrays, saved_facts, write_layer
from tiers import checkpoint
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.layout import Buffer, Precision
from tiers.master import split_master
from tiers.shard_store import ShardStore

Weights = dict[str, torch.Tensor]


def save_run(
    run_dir: Path,
    config: dict[str, Any],
    precision: Precision,
    source: Path | None = None,
    tokenizer: Path | None = None,
    **facts: Any,
) -> Weights:
    """Write a checkpoint of random fp32 masters as a run would, and return them by name."""
    model = model_layout(load_model_spec(source or config, precision))
    generator = torch.Generator().manual_seed(5)
    weights: Weights = {}
    writer = checkpoint.begin(run_dir, 7, model)
    records = []
    with DirectIO(requests=1) as io:
        store = ShardStore(writer.directory, model, io, DirectMode.BUFFERED)
        for layer in model.layers:
            arrays = empty_arrays(model, layer)
            for tensor in layer.tensors:
                values = torch.randn(tensor.shape, generator=generator) * 0.1
                place = slice(tensor.offset, tensor.offset + tensor.numel)
                flat = values.numpy().reshape(-1)
                if precision is Precision.FP32:
                    arrays[Buffer.WEIGHT][place] = flat
                else:
                    split_master(flat, arrays[Buffer.WEIGHT][place], arrays[Buffer.WEIGHT_LOW][place])
                weights[tensor.name] = values
            records += write_layer(store, layer, arrays)
    recipe = {
        "run": {"name": "test", "dir": str(run_dir)},
        "model": {"source": str(source)} if source else {"config": config},
        "data": {"path": "/nowhere", "tokenizer": str(tokenizer or "bytes")},
        "train": {"steps": 7, "sequence_length": 8, "sequences_per_step": 1},
        "precision": {"mode": str(precision)},
    }
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in recipe.items()
    )
    parse_recipe(text)
    writer.publish(records, saved_facts(model, 7).model_copy(update={"recipe": text, **facts}))
    return weights


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
