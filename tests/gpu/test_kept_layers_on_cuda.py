"""Layers that keep their graph on a GPU: every bit of a recomputed one, and no byte above the account."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.compute.template import LayerTemplate, tensor_views
from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.families.attention import build_attention_context
from pipeline.memory.activation_bytes import kept_graph_bytes, recomputed_bytes
from pipeline.memory.shapes import ComputeShape
from tiers.layout import Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

HIDDEN, SEQUENCES, LENGTH = 1024, 16, 1024
TOKENS = SEQUENCES * LENGTH


@pytest.mark.parametrize("family_name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_kept_layer_equals_a_recomputed_one_and_holds_what_the_account_says(family_name: str) -> None:
    spec = load_model_spec(
        {
            "model_type": family_name,
            "vocab_size": 512,
            "hidden_size": HIDDEN,
            "intermediate_size": 5504,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 128,
        },
        Precision.BF16,
    )
    family, layout = family_of(spec), model_layout(spec).layers[1]
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    slot, x, grad = normal(layout.numel) * 0.05, normal(SEQUENCES, LENGTH, HIDDEN), normal(SEQUENCES, LENGTH, HIDDEN)
    positions = torch.arange(LENGTH).repeat(SEQUENCES, 1)
    tables = family.build_rotary(torch.device("cuda"))(positions, torch.bfloat16)
    context = build_attention_context(positions, tables, family.windows, single_document=True)
    # Tests before this one may have asked for the deterministic backward of attention, which holds much more.
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    counters.clear()
    template = LayerTemplate(family, 1, layout, slot, compile=True, factor_weights=True)
    sums, kept_sums = (torch.zeros(layout.numel, device="cuda") for _ in range(2))
    for _ in range(2):  # the first compiles
        sums.zero_(), kept_sums.zero_()
        wanted = template.backward(x, context, grad, tensor_views(sums, layout))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y, graph = template.forward_kept(x, context)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - y.nbytes
        torch.cuda.reset_peak_memory_stats()
        got = template.backward_kept(graph, grad, tensor_views(kept_sums, layout))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - y.nbytes
        del y, graph  # or the next round frees them while it measures
    assert counters["stats"]["unique_graphs"] == 2
    qk_norms, shape = family_name == "qwen3", ComputeShape.of_config(spec.config.to_dict())
    account = TOKENS * kept_graph_bytes(shape, 2, True, qk_norms=qk_norms)
    assert account / 1.02 <= held <= account
    assert held < peak <= recomputed_bytes(shape, TOKENS, 2, True, qk_norms=qk_norms)
    assert torch.equal(got, wanted) and bool(got.any())
    assert torch.equal(kept_sums, sums)
