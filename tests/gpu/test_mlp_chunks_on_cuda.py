"""Compiled halves of a layer on a GPU: what they compute, how often they compile, and what they hold."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.compute.template import LayerTemplate, tensor_views
from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.families.attention import build_attention_context
from pipeline.memory.activation_bytes import recomputed_bytes
from pipeline.memory.shapes import ComputeShape
from tiers.layout import Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

HIDDEN, LENGTH, CHUNK = 1024, 16384, 3072
"""Six chunks, the last of them smaller."""


@pytest.mark.parametrize("family_name", ["llama", "qwen2", "qwen3", "mistral"])
def test_compiled_chunks_equal_the_whole_within_bf16_and_hold_no_more_than_the_account(family_name: str) -> None:
    spec = load_model_spec(
        {
            "model_type": family_name,
            "vocab_size": 512,
            "hidden_size": HIDDEN,
            "intermediate_size": 8 * HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        Precision.BF16,
    )
    family, layout = family_of(spec), model_layout(spec).layers[1]
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    slots = [normal(layout.numel) * 0.05 for _ in range(2)]
    x, grad = normal(1, LENGTH, HIDDEN), normal(1, LENGTH, HIDDEN)
    positions = torch.arange(LENGTH)[None]
    tables = family.build_rotary(torch.device("cuda"))(positions, torch.bfloat16)
    context = build_attention_context(positions, tables, family.windows, single_document=True)

    def run(slot: torch.Tensor, chunk: int) -> tuple[tuple[torch.Tensor, ...], int]:
        """Output and gradients, and bytes held at the peak of the second call, which compiles nothing."""
        template = LayerTemplate(family, 1, layout, slot, compile=True, factor_weights=True, mlp_chunk_tokens=chunk)
        peak, found = 0, tuple[torch.Tensor, ...]()
        for _ in range(2):
            sums = torch.zeros(layout.numel, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = template.forward(x, context)
            by_input = template.backward(x, context, grad, tensor_views(sums, layout))
            torch.cuda.synchronize()
            peak, found = torch.cuda.max_memory_allocated() - before, (y, by_input, *tensor_views(sums, layout))
        return found, peak

    # Tests before this one may have asked for the deterministic backward of attention, which holds much more.
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    counters.clear()
    for slot in slots:
        chunked, held = run(slot, CHUNK)
    assert counters["stats"]["unique_graphs"] == 6, "attention and two sizes of chunk, with and without gradients"
    whole, held_whole = run(slots[-1], 0)
    for got, wanted in zip(chunked, whole, strict=True):
        assert (got.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()
    shape = ComputeShape.of_config(spec.config.to_dict())
    # The output, which the forward leaves to its caller, is a boundary activation.
    for peak, size in ((held, CHUNK), (held_whole, 0)):
        account = recomputed_bytes(shape, LENGTH, 2, True, qk_norms=family_name == "qwen3", chunk_tokens=size)
        assert 0.8 * account < peak <= account + x.nbytes
