"""What a layer that is not recomputed keeps between forward and backward stays below the account."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.attention import build_attention_context
from pipeline.device_footprint import kept_graph_bytes
from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.shapes import ComputeShape
from pipeline.template import LayerTemplate
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
    assert graph.layer_output.requires_grad
    account = kept_graph_bytes(ComputeShape.of_config(spec.config.to_dict()), slot.element_size(), compiled=False)
    assert 0.4 * account < sum(kept.values()) / (SEQUENCES * LENGTH) <= account
