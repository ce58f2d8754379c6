"""One decoder layer with random weights and a batch, for tests that hold ways to compute it to one another."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.families import family_of, load_model_spec, model_layout
from pipeline.families.attention import AttentionContext, build_attention_context
from tiers.layout import Precision

SEQUENCES, LENGTH = 2, 24


class LayerCase:
    """Weights, inputs and gradients of the output are the same in every case of one model and precision."""

    def __init__(self, config: dict[str, object], precision: Precision, scale: float) -> None:
        """Make the layer of `config` with weights of the standard deviation `scale`, and packed documents for it."""
        spec = load_model_spec(config, precision)
        self.family = family_of(spec)
        self.layout = model_layout(spec).layers[1]
        dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.flat = normal(self.layout.numel) * scale
        self.x, self.grad = (normal(SEQUENCES, LENGTH, spec.hidden_size) for _ in range(2))
        positions = torch.arange(LENGTH).repeat(SEQUENCES, 1) % 11
        tables = self.family.build_rotary(torch.device("cpu"))(positions, dtype)
        self.context: AttentionContext = build_attention_context(
            positions, tables, self.family.windows, single_document=False
        )
