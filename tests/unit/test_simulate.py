from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.memory.homes import homes
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from pipeline.messages import Lane
from pipeline.placement import MemoryBudget, Placement, PlacementRequest, place
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Device, Hardware, Host, Link, Nvme
from pipeline.prediction.simulate import Prediction, simulate
from tiers.layout import InitKind, LayerKind, LayerLayout, ModelLayout, Precision, TensorSpec, place_tensors

COMPUTE = ComputeShape(
    hidden_size=4096, intermediate_size=11008, query_size=4096, kv_size=1024, head_size=128, vocab_size=32768
)
STEP = StepShape(sequence_length=1024, sequences=16, micro_batch=4)
DECODER = 200_000_000
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate": (11008, 4096), "up": (11008, 4096), "down": (4096, 11008)}
MACHINE = Hardware(
    name="test",
    origin="made up",
    device=Device("gpu", 80.0, 500.0, 2000.0, 0.8),
    link=Link(25.0, 25.0, 20.0),
    host=Host(16, 512.0, 100.0, 4.0, 3.0),
    nvme=Nvme(4000.0, 6.0, 5.0, 4.0, 3.0),
)


def layer(index: int, name: str, kind: LayerKind, numel: int) -> LayerLayout:
    tensors, padded = place_tensors([TensorSpec(f"{name}.weight", (numel,), 0, True, InitKind.NORMAL)])
    return LayerLayout(index, name, kind, tensors, padded)


def model(decoders: int = 12) -> ModelLayout:
    vocab = COMPUTE.vocab_size * COMPUTE.hidden_size
    layers = [layer(0, "embedding", LayerKind.EMBEDDING, vocab)]
    layers += [layer(i + 1, f"layer-{i:04d}", LayerKind.DECODER, DECODER) for i in range(decoders)]
    layers.append(layer(decoders + 1, "head", LayerKind.HEAD, vocab))
    return ModelLayout(tuple(layers), Precision.BF16, tied=False)


def placed(
    clip: bool, state: int = 0, weights: int = 0, slots: int = 3, *, device_updates: bool = False, kept_layers: int = 0
) -> Placement:
    request = PlacementRequest(
        model(), COMPUTE, STEP, clip, ProcessShape(), device_updates=device_updates, kept_layers=kept_layers
    )
    found = place(request, MemoryBudget(2**50, 2**50, 2**50))
    forced = homes(
        request.model,
        clip=clip,
        state=range(1, state + 1),
        weights=range(1, weights + 1),
        staging_slots=slots,
    )
    schedule = replace(
        found.schedule,
        weight_slots=tuple(home.weight_slot for home in forced),
        state_slots=tuple(home.state_slot for home in forced),
    )
    return replace(found, tier=replace(found.tier, homes=forced), schedule=schedule)


def predict(placement: Placement, machine: Hardware = MACHINE, step: StepShape = STEP) -> Prediction:
    return simulate(CostModel(placement, COMPUTE, step, machine))


def busy(prediction: Prediction, lane: Lane) -> float:
    return next(load.busy_s for load in prediction.lanes if load.lane is lane)


@pytest.mark.parametrize("clip", [True, False])
def test_no_lane_works_longer_than_the_step_and_the_step_is_no_longer_than_all_of_them(clip: bool) -> None:
    for state, weights in ((0, 0), (12, 0), (12, 12)):
        prediction = predict(placed(clip, state, weights))
        total = sum(load.busy_s for load in prediction.lanes)
        assert max(load.busy_s for load in prediction.lanes) <= prediction.step_s * (1 + 1e-9)
        assert prediction.step_s <= total + prediction.waiting_s + 1e-9


@pytest.mark.parametrize("clip", [True, False])
def test_length_of_the_step_is_explained_by_its_critical_lanes(clip: bool) -> None:
    prediction = predict(placed(clip, 12, 12))
    explained = sum(load.critical_s for load in prediction.lanes) + prediction.waiting_s
    assert explained == pytest.approx(prediction.step_s, rel=1e-6)
    idle = prediction.step_s - busy(prediction, Lane.COMPUTE)
    assert sum(seconds for _, seconds in prediction.stalls) <= idle + 1e-9


def test_bound_by_compute_when_the_batch_is_large() -> None:
    large = replace(STEP, sequences=256)
    prediction = predict(placed(clip=False), step=large)
    assert prediction.bottleneck is Lane.COMPUTE
    assert busy(prediction, Lane.COMPUTE) / prediction.step_s > 0.95


def test_smaller_micro_batches_are_never_faster_and_many_tokens_reach_the_machine_s_rate() -> None:
    matrices = [TensorSpec(f"{name}.weight", shape, 0, True, InitKind.NORMAL) for name, shape in MATRICES.items()]
    tensors, numel = place_tensors(matrices)
    whole = placed(clip=False, kept_layers=0)
    layers = tuple(
        replace(layer, tensors=tensors, numel=numel) if layer.kind is LayerKind.DECODER else layer
        for layer in whole.tier.model.layers
    )
    placement = replace(whole, tier=replace(whole.tier, model=replace(whole.tier.model, layers=layers)))
    large = replace(STEP, sequences=64)
    times = [
        busy(predict(placement, step=replace(large, micro_batch=size)), Lane.COMPUTE) for size in (1, 2, 4, 8, 16, 64)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.15 * times[-1]
    exact = replace(MACHINE, device=replace(MACHINE.device, product_tail=0.0, pass_s=0.0))
    assert times[-1] < 1.02 * busy(predict(placement, exact, replace(large, micro_batch=64)), Lane.COMPUTE)


def test_a_layer_takes_no_less_than_the_host_needs_to_launch_it() -> None:
    slow = replace(MACHINE, device=replace(MACHINE.device, pass_s=0.1))
    passes = 12 * (1 + 3) * STEP.sequences // STEP.micro_batch
    assert busy(predict(placed(clip=False, kept_layers=0), slow), Lane.COMPUTE) > 0.1 * passes


def test_bound_by_the_optimizer_when_the_host_is_slow() -> None:
    slow = replace(MACHINE, host=replace(MACHINE.host, update_gparams_per_s=0.5, update_busy_gparams_per_s=0.4))
    assert predict(placed(clip=False), slow).bottleneck is Lane.UPDATE


def test_bound_by_the_drive_when_state_streams_and_lists_every_byte() -> None:
    prediction = predict(placed(clip=False, state=12))
    assert prediction.bottleneck in (Lane.NVME_READ, Lane.NVME_WRITE)
    padded = model().layers[1].numel
    assert prediction.nvme_read_bytes == prediction.nvme_write_bytes == 12 * padded * 10
    with_weights = predict(placed(clip=False, state=12, weights=12))
    # Weights are written with the state, and read three times: forward, backward and for the update; the last layers
    # of the forward pass are still on the device when backward begins.
    assert with_weights.nvme_write_bytes == 12 * padded * 12
    assert 12 * padded * 14 <= with_weights.nvme_read_bytes <= 12 * padded * 16


@pytest.mark.parametrize("state", [0, 12])
def test_gradients_held_on_the_device_cross_the_link_once_and_gain_no_time(state: int) -> None:
    in_ram = placed(clip=True, state=state)
    forced = homes(
        in_ram.tier.model, clip=True, state=range(1, state + 1), weights=[], staging_slots=3, device_gradients=14
    )
    schedule = replace(
        in_ram.schedule,
        gradient_slots=tuple(home.gradient_slot for home in forced),
        gradient_spans=tuple(home.gradient_span for home in forced),
        device_gradients=tuple(home.gradient_on_device for home in forced),
    )
    on_device = predict(replace(in_ram, tier=replace(in_ram.tier, homes=forced), schedule=schedule))
    assert busy(on_device, Lane.D2H) == pytest.approx(busy(predict(in_ram), Lane.D2H), rel=0.3)
    assert on_device.step_s >= predict(in_ram).step_s * 0.999
    assert on_device.step_s <= predict(in_ram).step_s * 1.2


def test_clipping_never_makes_a_step_shorter() -> None:
    assert predict(placed(clip=True)).step_s >= predict(placed(clip=False)).step_s * 0.999


def test_faster_parts_never_make_a_much_longer_step() -> None:
    base = predict(placed(clip=True, state=12)).step_s
    faster = replace(MACHINE, nvme=Nvme(4000.0, 12.0, 10.0, 8.0, 6.0))
    assert predict(placed(clip=True, state=12), faster).step_s < base


def test_predicted_compute_agrees_with_arithmetic_by_hand() -> None:
    prediction = predict(placed(clip=False))
    rate = 500e12 * 0.8
    # Forward, again without the last projection, and back: twice the products and 2.5 times the attention.
    products = (4 * 2 * DECODER - 2 * COMPUTE.intermediate_size * COMPUTE.hidden_size) * STEP.tokens / rate
    attention = 4.5 * 2 * STEP.sequence_length * COMPUTE.query_size * STEP.tokens / (500e12 * 0.25)
    moved = 33 * COMPUTE.hidden_size + 6 * (COMPUTE.query_size + COMPUTE.kv_size) + 11 * COMPUTE.intermediate_size
    decoder = products + attention + 2 * moved * STEP.tokens / 2000e9
    head = 6 * COMPUTE.vocab_size * COMPUTE.hidden_size * STEP.tokens / rate
    assert busy(prediction, Lane.COMPUTE) == pytest.approx(12 * decoder + head, rel=0.1)
    assert busy(prediction, Lane.COMPUTE) >= 12 * decoder + head


def test_updates_on_the_device_take_away_the_wait_at_the_start_of_a_step() -> None:
    long = replace(STEP, sequences=128)
    on_host, on_device = predict(placed(True), step=long), predict(placed(True, device_updates=True), step=long)
    waited = sum(seconds for _, seconds in on_host.stalls)
    waits = sum(seconds for _, seconds in on_device.stalls)
    assert waits < 0.2 * waited
    assert on_device.step_s < on_host.step_s - 0.7 * waited


def test_layers_that_keep_their_graph_save_their_recompute_and_their_second_streaming() -> None:
    recomputed, kept = predict(placed(True)), predict(placed(True, kept_layers=6))
    moved = {prediction: {load.lane: load.busy_s for load in prediction.lanes} for prediction in (recomputed, kept)}
    assert moved[kept][Lane.H2D] < moved[recomputed][Lane.H2D]
    assert moved[kept][Lane.COMPUTE] < 0.93 * moved[recomputed][Lane.COMPUTE]
