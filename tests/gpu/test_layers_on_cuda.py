"""What only a GPU can show: the variable-length kernel, compiled layers and the head's product into fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.compute.head import Head
from pipeline.compute.template import LayerTemplate, tensor_views
from pipeline.families import Family, family_of, load_model_spec, model_layout
from pipeline.families.attention import AttentionContext, build_attention_context
from pipeline.messages import IGNORED
from tiers.layout import LayerLayout, Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

HIDDEN, LENGTH = 256, 256
DOCUMENTS = ((100, 1, 55, 100), (256,), (3,) * 80 + (16,))


def positions_of(documents: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])[None].expand(2, LENGTH)


def family_with(window: int | None) -> Family:
    config = {
        "model_type": "mistral",
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": window,
    }
    return family_of(load_model_spec(config, Precision.BF16))


def filled_slot(layout: LayerLayout) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(layout.index)
    return (torch.randn(layout.numel, generator=generator, device="cuda") * 0.05).bfloat16()


def context_of(family: Family, positions: Tensor, dtype: torch.dtype) -> AttentionContext:
    tables = family.build_rotary(torch.device("cuda"))(positions, dtype)
    return build_attention_context(positions, tables, family.windows, single_document=False)


@pytest.mark.parametrize("window", [None, 50])
def test_packed_documents_by_the_kernel_equal_the_mask_and_never_compile_anew(window: int | None) -> None:
    family = family_with(window)
    layers = model_layout(family.spec).layers[1:3]
    torch._dynamo.reset()
    counters.clear()
    slots = [filled_slot(layer) for layer in layers]
    templates = [LayerTemplate(family, d.index, d, slot, compile=True) for d, slot in zip(layers, slots, strict=True)]
    x = torch.randn(2, LENGTH, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    for documents in DOCUMENTS:
        positions = positions_of(documents)
        context, exact_context = (context_of(family, positions, dtype) for dtype in (torch.bfloat16, torch.float32))
        assert context.document_starts is not None
        assert exact_context.documents is not None
        for template, layer, slot in zip(templates, layers, slots, strict=True):
            exact = LayerTemplate(family, layer.index, layer, slot.float())
            grads, exact_grads = (torch.zeros(layer.numel, device="cuda") for _ in range(2))
            pairs = [
                (template.forward(x, context), exact.forward(x.float(), exact_context)),
                (
                    template.backward(x, context, x, tensor_views(grads, layer)),
                    exact.backward(x.float(), exact_context, x.float(), tensor_views(exact_grads, layer)),
                ),
                (grads, exact_grads),
            ]
            for got, expected in pairs:
                assert (got.float() - expected).norm() < 0.02 * expected.norm()
    assert counters["stats"]["unique_graphs"] == 2, "one without gradients and one with"


@pytest.mark.parametrize("compile", [False, True])
def test_head_adds_products_of_bf16_into_fp32(compile: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(2, 1000, HIDDEN, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(5003, HIDDEN, device="cuda", generator=generator) * 0.1).bfloat16()
    targets = torch.randint(0, 5003, (2, 1000), device="cuda", generator=generator)
    targets[0, :300] = IGNORED
    norm = family_with(None).build_final_norm()
    norm.weight = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))
    norm_grad, weight_grad = torch.zeros(HIDDEN, device="cuda"), torch.ones(5003, HIDDEN, device="cuda")
    loss, grad_x = Head(512, compile=compile).loss_and_backward(
        x, targets, norm, weight, 1 / 1700, norm_grad, weight_grad
    )
    exact_x, exact_weight = x.float().requires_grad_(), weight.float().requires_grad_()
    logits = F.linear(norm(exact_x.flatten(0, 1)), exact_weight)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / 1700
    expected_x, expected_weight = torch.autograd.grad(expected, (exact_x, exact_weight))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=0)
    assert (grad_x.float() - expected_x).norm() < 0.02 * expected_x.norm()
    assert (weight_grad - 1 - expected_weight).norm() < 0.02 * expected_weight.norm()
