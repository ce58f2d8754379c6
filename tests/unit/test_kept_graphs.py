"""What a layer that is not recomputed keeps between forward and backward stays below the account."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.compute.template import LayerTemplate
from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.families.attention import build_attention_context
from pipeline.memory.activation_bytes import kept_graph_bytes
from pipeline.memory.shapes import ComputeShape
from support.tiny import FAMILIES, tiny_config
from tiers.layout import Precision

SEQUENCES, LENGTH = 2, 64


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("family_name", FAMILIES)
def test_an_uncompiled_layer_keeps_no_more_than_the_account_says(family_name: str, precision: Precision) -> None:
    config = tiny_config(family_name, hidden_size=128, intermediate_size=384)
    spec = load_model_spec(config, precision)
    family, layout = family_of(spec), model_layout(spec).layers[1]
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    positions = torch.arange(LENGTH).repeat(SEQUENCES, 1) % 19
    tables = family.build_rotary(torch.device("cpu"))(positions, dtype)
    context = build_attention_context(positions, tables, family.windows, single_document=False)
    slot = torch.ones(layout.numel, dtype=dtype) * 0.01
    template = LayerTemplate(family, 1, layout, slot)
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() != slot.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        _, graph = template.forward_kept(torch.ones(SEQUENCES, LENGTH, 128, dtype=dtype), context)
    assert graph.output_edge.node is not None
    shape = ComputeShape.of_config(spec.config.to_dict())
    account = kept_graph_bytes(shape, slot.element_size(), compiled=False, qk_norms=family_name == "qwen3")
    assert 0.4 * account < sum(kept.values()) / (SEQUENCES * LENGTH) <= account


def test_a_compiled_7b_layer_is_accounted_what_an_h200_kept_and_at_most_2_percent_more() -> None:
    """FAULTS B140. Measured: 99,448 bytes a token beside the layer's input."""
    shape = ComputeShape(3584, 18944, 28 * 128, 4 * 128, 128, 152064)
    assert 99_448 <= kept_graph_bytes(shape, 2, compiled=True, qk_norms=False) <= 1.02 * 99_448
