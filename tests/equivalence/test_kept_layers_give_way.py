"""Where the device has less memory than planned, kept layers become recomputed ones, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.compute.template import KeptGraph, LayerTemplate
from pipeline.families.attention import AttentionContext
from support.inline import Case, inline_run
from support.tiny import random_batch, tiny_config
from tiers.layout import Precision

BATCHES = [random_batch(seed) for seed in range(3)]


def test_a_device_that_fills_up_recomputes_from_there_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tiny_config("llama"), Precision.BF16, 0.5)
    with inline_run(case) as run:
        wanted = run.train(BATCHES), run.weights()
    forward_kept, calls = LayerTemplate.forward_kept, []

    def limited(template: LayerTemplate, x: Tensor, context: AttentionContext) -> tuple[Tensor, KeptGraph]:
        """Room for two layers of two micro-batches, and half of the third."""
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward_kept(template, x, context)

    monkeypatch.setattr(LayerTemplate, "forward_kept", limited)
    with inline_run(replace(case, kept_layers=4)) as run:
        got = run.train(BATCHES), run.weights()
    assert [r.loss for r in got[0]] == [r.loss for r in wanted[0]]
    assert all(torch.equal(got[1][name], weight) for name, weight in wanted[1].items())
    assert len(calls) == 6 + 2 * 2, "one layer of two micro-batches in each later step"
    assert [record.message.split(":")[0] for record in caplog.records] == ["device memory ended at layer 4"]
    assert "1 decoder layers keep their activations instead of 4" in caplog.text
