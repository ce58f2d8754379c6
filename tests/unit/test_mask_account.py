"""Attention masks of packed documents, which attention without a kernel for them needs, are in the plan."""

from __future__ import annotations

import pytest
import torch

from pipeline.compute.template import LayerTemplate, tensor_views
from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.families.attention import build_attention_context
from pipeline.memory.activation_bytes import mask_bytes
from pipeline.memory.device_footprint import device_terms
from pipeline.memory.shapes import ComputeShape, StepShape
from support.live_bytes import LiveBytes
from support.tiny import tiny_config
from tiers.layout import Precision

STEP = StepShape(sequence_length=256, sequences=4, micro_batch=2)


def peak_bytes(*, packed: bool, kept: bool) -> int:
    """Bytes that two steps' micro-batches hold at most while they pass one layer and the first goes back."""
    spec = load_model_spec(tiny_config("llama"), Precision.FP32)
    family, layout = family_of(spec), model_layout(spec).layers[1]
    positions = torch.arange(STEP.sequence_length).repeat(STEP.micro_batch, 1) % (100 if packed else 10**6)
    slot, sums = torch.ones(layout.numel) * 0.01, torch.zeros(layout.numel)
    template = LayerTemplate(family, 1, layout, slot)
    x = torch.ones(STEP.micro_batch, STEP.sequence_length, spec.hidden_size)
    tables = family.build_rotary(torch.device("cpu"))(positions, torch.float32)
    with LiveBytes([slot, sums, x, positions, *tables]) as live:
        contexts = [
            build_attention_context(positions, tables, family.windows, single_document=not packed)
            for _ in range(2 * STEP.micro_batches)
        ]
        first = contexts[: STEP.micro_batches]
        graphs = [template.forward_kept(x, context)[1] for context in first] if kept else []
        for context in first:
            if kept:
                template.backward_kept(graphs.pop(0), x, tensor_views(sums, layout))
            else:
                template.backward(x, context, x, tensor_views(sums, layout))
    return live.peak


@pytest.mark.parametrize("kept", [False, True])
def test_masks_take_no_more_than_the_account_says(kept: bool) -> None:
    taken = peak_bytes(packed=True, kept=kept) - peak_bytes(packed=False, kept=kept)
    account = mask_bytes(STEP, 4, kept_layers=int(kept), waves=1, compiled=False)
    assert 0.5 * account < taken <= account


@pytest.mark.parametrize(("precision", "masked"), [(Precision.BF16, False), (Precision.FP32, True)])
def test_a_gpu_needs_masks_in_fp32_alone(precision: Precision, masked: bool) -> None:
    spec = load_model_spec(tiny_config("qwen3"), precision)
    terms = device_terms(model_layout(spec), ComputeShape.of_config(spec.config.to_dict()), STEP, 2, decoder_slots=2)
    found = [term.num_bytes for term in terms if term.name == "attention masks"]
    assert found == ([mask_bytes(STEP, 4, kept_layers=0, waves=1, compiled=True)] if masked else [])
