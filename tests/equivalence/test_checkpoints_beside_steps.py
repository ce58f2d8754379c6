"""A checkpoint holds every bit of the state after its step, however far the steps after it have come by then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.inline import Case, inline_run
from support.stores import saved_facts
from support.tiny import random_batch, tiny_config
from tasks.stored_model import StoredModel
from tiers.checkpoint import begin
from tiers.layout import Precision
from tiers.manifest import read_manifest
from tiers.staging import BLOCK_BYTES
from tiers.store_metadata import Compression

BATCHES = [random_batch(step) for step in range(1, 5)]
CASE = Case(tiny_config("qwen3"), Precision.BF16, 0.5)
CASES = {
    "clipped": CASE,
    "unclipped": replace(CASE, max_grad_norm=None),
    "exact": replace(CASE, precision=Precision.FP32),
    "updated on the device": replace(CASE, device_updates=(0, 1, 2), kept_layers=1),
    "in waves": replace(CASE, waves=2),
    "partly on nvme": replace(CASE, state_on_nvme=(2, 3, 4), weights_on_nvme=(3, 4)),
    "compressed": replace(CASE, compression=Compression.ZSTD),
}
ALL = 100
"""Blocks for every chunk of these models."""


@pytest.mark.parametrize("blocks", [0, 3, ALL])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_the_state_after_its_step(name: str, blocks: int, tmp_path: Path) -> None:
    with inline_run(CASES[name] if name != "partly on nvme" else replace(CASES[name], nvme_dir=tmp_path)) as run:
        results = run.train(BATCHES[:2])
        wanted, reference = run.weights(), tmp_path / "reference"
        reference.mkdir()
        layers = range(run.schedule.num_layers)
        records = {file.path: file for layer in layers for file in run.prefetcher.snapshot(layer, reference)}
        results += [run.step(step, BATCHES[step - 1]) for step in (3, 4)]
        end = run.weights()
    (tmp_path / "again").mkdir()
    case = replace(CASES[name], staging_bytes=blocks * BLOCK_BYTES)
    case = replace(case, nvme_dir=tmp_path / "again") if case.state_on_nvme else case
    with inline_run(case) as run:
        writer = begin(tmp_path, 2, run.map.plan.model)
        again = [run.step(1, BATCHES[0])]
        # With room for all nothing is written before the next step is over: all of it comes from copies.
        if blocks == ALL and not case.state_on_nvme:
            run.may_write.clear()
        again += [run.step(2, BATCHES[1], writer.directory), run.step(3, BATCHES[2])]
        run.may_write.set()
        files = [file for layer in layers for file in run.snapshots[layer].result()]
        again.append(run.step(4, BATCHES[3]))
        assert all(torch.equal(tensor, end[tensor_name]) for tensor_name, tensor in run.weights().items())
        path = writer.publish(files, saved_facts(run.map.plan.model, 2))
    assert again == results
    stored = read_manifest(path).records()
    assert {name: stored[name] for name in records} == records
    model = StoredModel.open(path)
    for tensor in model.tensors:
        assert torch.equal(model.read(tensor, torch.float32), wanted[tensor.name]), tensor.name
