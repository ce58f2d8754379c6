"""Slots and gradient buffers on a machine without a device: same code, streams without effect."""

from __future__ import annotations

import pytest
import torch

from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.gradient_buffers import Accumulators, OutgoingGradients, sum_of_squares
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import open_streams
from pipeline.messages import Lane
from pipeline.step.operations import EMBEDDING_SLOT, HEAD_SLOT
from tiers.layout import InitKind, LayerKind, LayerLayout, ModelLayout, Precision, TensorSpec, place_tensors

CPU = torch.device("cpu")


def layout(*, tied: bool, decoders: int = 3) -> ModelLayout:
    def layer(index: int, kind: LayerKind, numel: int) -> LayerLayout:
        tensors, padded = place_tensors([TensorSpec(f"{index}.weight", (numel,), 0, True, InitKind.NORMAL)])
        return LayerLayout(index, f"layer-{index}", kind, tensors, padded)

    middle = [layer(index, LayerKind.DECODER, 2000) for index in range(1, decoders + 1)]
    head = layer(decoders + 1, LayerKind.HEAD, 64 if tied else 5000)
    return ModelLayout((layer(0, LayerKind.EMBEDDING, 5000), *middle, head), Precision.FP32, tied)


def weights_of(model: ModelLayout) -> list[torch.Tensor]:
    return [torch.full((layer.numel,), float(layer.index + 1)) for layer in model.layers]


def slots_of(model: ModelLayout, decoder_slots: int = 2) -> WeightSlots:
    return WeightSlots(model, decoder_slots, weights_of(model), open_streams(CPU))


def test_a_reader_sees_the_layer_that_was_staged_last() -> None:
    slots, spans = slots_of(layout(tied=False)), SpanRecorder("compute", True)
    for layer, slot in ((1, 0), (2, 1), (3, 0)):
        slots.stage(layer, slot, spans)
        with slots.reading(layer, slot) as weights:
            assert weights.unique().tolist() == [layer + 1]
    assert [span.name for span in spans.take()] == ["stage[1]", "stage[2]", "stage[3]"]


def test_reading_a_layer_that_is_not_in_its_slot_is_refused() -> None:
    slots, spans = slots_of(layout(tied=False)), SpanRecorder("compute", False)
    slots.stage(1, 0, spans)
    slots.stage(3, 0, spans)
    with pytest.raises(AssertionError, match="slot 0 holds 3, not layer 1"), slots.reading(1, 0):
        pass


def test_device_memory_of_slots_does_not_depend_on_depth() -> None:
    assert slots_of(layout(tied=True, decoders=2)).num_bytes == slots_of(layout(tied=True, decoders=20)).num_bytes


def test_an_untied_head_uses_the_memory_of_the_embedding() -> None:
    untied, tied = slots_of(layout(tied=False)), slots_of(layout(tied=True))
    assert untied.buffer(EMBEDDING_SLOT) is untied.buffer(HEAD_SLOT)
    assert tied.buffer(EMBEDDING_SLOT) is not tied.buffer(HEAD_SLOT)


def test_a_tied_matrix_is_summed_apart_from_the_decoder_layers() -> None:
    for tied in (True, False):
        model = layout(tied=tied)
        accumulators = Accumulators(model, CPU)
        embedding, decoder = accumulators.of(model.layers[0]), accumulators.of(model.layers[1])
        assert (embedding.data_ptr() == decoder.data_ptr()) is not tied
        assert accumulators.of(model.layers[-1]).shape == (model.layers[-1].numel,)


def test_a_gradient_leaves_converted_and_the_accumulator_is_zero_again() -> None:
    model, streams = layout(tied=False), open_streams(CPU)
    spans = SpanRecorder("compute", True)
    accumulators, outgoing = Accumulators(model, CPU), OutgoingGradients(model, 2, torch.bfloat16, streams)
    landed = [torch.full((layer.numel,), float("nan")).bfloat16() for layer in model.layers]
    for step in (1, 2):
        for layer in reversed(model.layers):
            accumulator = accumulators.of(layer)
            accumulator.add_(step + layer.index / 8)
            outgoing.fill(step, layer.index, accumulator)
            assert not accumulator.any()
            outgoing.drain(step, layer.index, landed[layer.index], spans).synchronize()
            assert landed[layer.index].unique().tolist() == [step + layer.index / 8]
    assert {span.lane for span in spans.take()} == {Lane.D2H}


def test_a_gradient_that_has_not_left_is_never_overwritten() -> None:
    model, streams = layout(tied=False), open_streams(CPU)
    outgoing = OutgoingGradients(model, 2, torch.bfloat16, streams)
    outgoing.fill(1, 4, torch.zeros(model.layers[4].numel))
    outgoing.fill(1, 3, torch.zeros(model.layers[3].numel))
    with pytest.raises(AssertionError, match="would be overwritten"):
        outgoing.fill(1, 2, torch.zeros(model.layers[2].numel))


def test_norm_of_a_million_small_gradients_is_exact() -> None:
    gradient = torch.zeros(1 << 20)
    gradient[:1_000_000] = torch.tensor(1e-3, dtype=torch.bfloat16).float()
    value = float(torch.tensor(1e-3, dtype=torch.bfloat16))
    norm = sum_of_squares(gradient).sqrt().item()
    assert abs(norm / (value * 1000) - 1) < 1e-6
    assert len({sum_of_squares(gradient).item() for _ in range(20)}) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_single_bad_element_shows_in_the_sum_of_squares(bad: float) -> None:
    gradient = torch.zeros(4096)
    gradient[3000] = bad
    assert not torch.isfinite(sum_of_squares(gradient))
