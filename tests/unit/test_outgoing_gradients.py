"""Device buffers of finished gradients: which exist when."""

from __future__ import annotations

import torch

from pipeline.compute.gradient_buffers import OutgoingGradients
from pipeline.compute.streams import open_streams
from pipeline.families import load_model_spec, model_layout
from support.tiny import tiny_config
from tiers.layout import Precision


def test_the_gradient_of_a_layer_that_is_updated_here_has_memory_only_until_it_is_used() -> None:
    model = model_layout(load_model_spec(tiny_config("qwen2"), Precision.BF16))
    streams = open_streams(torch.device("cpu"))
    outgoing = OutgoingGradients(model, 2, torch.bfloat16, streams, held=(3,), updated_here=(1,))
    for_good = outgoing.num_bytes
    sums = torch.full((model.layers[1].numel,), 1.5)
    for step in (1, 2):
        outgoing.fill(step, 1, sums)
        assert outgoing.num_bytes == for_good + 2 * model.layers[1].numel
        assert not sums.any() and outgoing.read(step, 1).eq(1.5 if step == 1 else 0.0).all()
        outgoing.discard(step, 1)
        assert outgoing.num_bytes == for_good
    outgoing.fill(1, 3, torch.ones(model.layers[3].numel))
    outgoing.discard(1, 3)
    assert outgoing.num_bytes == for_good, "one that may leave keeps its buffer"
