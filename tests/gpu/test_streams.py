"""On a GPU: copies and compute overlap, and no buffer is read before it is full nor filled while it is read."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from pipeline.compute import Compute, ComputeSettings
from pipeline.compute.activations import Boundaries
from pipeline.compute.carried_sums import CarriedSums
from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.gradient_buffers import Accumulators, OutgoingGradients
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import open_streams
from pipeline.families import load_model_spec, model_layout
from pipeline.messages import Lane
from support.local_compute import LR, local_compute
from support.tiny import random_batch, tiny_config
from tiers.arena_map import LayerHome, TierPlan
from tiers.layout import ElementType, LayerKind, ModelLayout, Precision
from tiers.parameter_tier import ParameterTier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SPIN_CYCLES = 20_000_000
"""About 10 ms of an H200: far longer than any copy here."""


def model() -> ModelLayout:
    return model_layout(load_model_spec(tiny_config("llama"), Precision.FP32))


def cuda() -> torch.device:
    return torch.device("cuda", 0)


def pinned(numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), value).pin_memory()


def test_a_slot_is_not_overwritten_while_its_reader_runs() -> None:
    layout, streams, spans = model(), open_streams(cuda()), SpanRecorder("compute", False)
    weights = [pinned(layer.numel, float(layer.index)) for layer in layout.layers]
    slots = WeightSlots(layout, 1, weights, streams)
    for _ in range(100):
        sums = []
        for layer in (1, 2, 3):
            slots.stage(layer, 0, spans)
            with streams.compute.enqueue(), slots.reading(layer, 0) as flat:
                torch.cuda._sleep(SPIN_CYCLES // 20)
                sums.append(flat.amin())
                sums.append(flat.amax())
        streams.synchronize()
        assert [int(value) for value in sums] == [1, 1, 2, 2, 3, 3]


def test_the_ram_slot_of_weights_on_nvme_may_be_loaded_anew_once_they_are_staged() -> None:
    spec = load_model_spec(tiny_config("llama"), Precision.FP32)
    layout = model_layout(spec)
    homes = tuple(
        LayerHome(*((0, 0) if layer.kind is LayerKind.DECODER else (None, None)), layer.index)
        for layer in layout.layers
    )
    tier = ParameterTier(TierPlan(layout, homes, ElementType.FLOAT32))
    arena, arena_map = tier.handle().attach()
    compute = Compute(spec, tier.handle(), ComputeSettings(LR, 1.0, device="cuda"))
    memory, target = arena.view(arena_map.weights[1]), compute._slots.buffer(0)
    memory[:] = 1
    compute.stage(1, 1, 0)
    for value in range(2, 12):
        memory[:] = value
        with compute._streams.compute.enqueue(), compute._slots.reading(1, 0):
            torch.cuda._sleep(SPIN_CYCLES)
        compute.stage(1, 1, 0)
        memory[:] = 0  # what the next `load_weights` does
        compute._streams.synchronize()
        assert target[: memory.size].min() == target[: memory.size].max() == value
    compute.close()
    arena.close()
    tier.close()


def test_a_gradient_lands_whole_and_is_not_overwritten_on_its_way() -> None:
    layout, streams, spans = model(), open_streams(cuda()), SpanRecorder("compute", False)
    accumulators = Accumulators(layout, cuda())
    outgoing = OutgoingGradients(layout, 2, torch.float32, streams)
    landed = {layer.index: pinned(layer.numel, math.nan) for layer in layout.layers}
    for step in range(1000):
        for layer in reversed(layout.layers):
            with streams.compute.enqueue():
                if step % 50 == 0:
                    torch.cuda._sleep(SPIN_CYCLES)
                accumulator = accumulators.of(layer)
                accumulator.add_(step + layer.index)
                outgoing.fill(step, layer.index, accumulator)
            landed[layer.index].fill_(math.nan)
            outgoing.drain(step, layer.index, landed[layer.index], spans).synchronize()
            assert landed[layer.index].min() == landed[layer.index].max() == step + layer.index


def test_sums_wait_on_the_host_for_the_next_wave_behind_slow_work() -> None:
    layout, streams, spans = model(), open_streams(cuda()), SpanRecorder("compute", False)
    accumulators = Accumulators(layout, cuda(), 2)
    carried = CarriedSums(
        accumulators, {layer.index: pinned(layer.numel, math.nan) for layer in layout.layers}, streams
    )
    backward = layout.layers[:0:-1]
    for step in range(20):
        totals = {}
        for wave in range(3):
            for layer in backward:
                if wave:
                    carried.fetch(layer, spans)
                with streams.compute.enqueue():
                    torch.cuda._sleep(SPIN_CYCLES // 20)
                    carried.open(layer)
                    accumulators.of(layer).add_(step + layer.index)
                    if wave == 2:
                        total = accumulators.of(layer)
                        totals[layer.index] = total.amin(), total.amax()
                        total.zero_()
                    carried.close(layer)
                if wave < 2:
                    carried.store(layer, spans)
        streams.synchronize()
        for index, (least, most) in totals.items():
            assert least.item() == most.item() == 3 * (step + index)


def test_spilled_activations_come_back_bit_equal_behind_slow_work() -> None:
    streams = open_streams(cuda())
    room = torch.zeros(8 << 20, dtype=torch.uint8).pin_memory()
    boundaries = Boundaries(streams, room)
    for step in range(20):
        kept = {}
        for layer in (1, 2, 3):
            with streams.compute.enqueue():
                torch.cuda._sleep(SPIN_CYCLES // 20)
                x = torch.randn(1 << 18, device=cuda())
                kept[layer] = x.sum(dtype=torch.float64)
                boundaries.keep(step, layer, [x], piece=layer - 1)
                del x
                boundaries.leave(step, layer)
                # What would be handed the memory of x if nothing held it.
                torch.full((1 << 18,), math.nan, device=cuda())
        for layer in (3, 2, 1):
            with streams.compute.enqueue():
                (x,) = boundaries.take(step, layer)
                boundaries.prefetch(step, layer - 1)
                torch.cuda._sleep(SPIN_CYCLES // 20)
                difference = x.sum(dtype=torch.float64) - kept[layer]
                del x
            streams.synchronize()
            assert difference.item() == 0


def test_calls_return_before_the_device_has_finished_and_copies_run_beside_compute() -> None:
    layout, streams, spans = model(), open_streams(cuda()), SpanRecorder("compute", True)
    slots = WeightSlots(layout, 2, [pinned(layer.numel, 1.0) for layer in layout.layers], streams)
    slots.stage(1, 0, spans)
    streams.synchronize()
    start_s = time.monotonic()
    with streams.compute.enqueue(), slots.reading(1, 0), spans.span("forward[1]", Lane.COMPUTE, streams.compute):
        torch.cuda._sleep(50 * SPIN_CYCLES)
    slots.stage(2, 1, spans)
    returned_s = time.monotonic()
    streams.synchronize()
    end_s = time.monotonic()
    found = {span.name: span for span in spans.take()}
    forward, copy = found["forward[1]"], found["stage[2]"]
    assert returned_s < forward.end_s, "the call must not wait for the device"
    assert copy.end_s < forward.end_s, "the copy must not wait for the compute stream"
    assert start_s - 1e-3 <= forward.start_s < forward.end_s <= end_s + 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_on_the_gpu_equals_one_on_the_cpu(tied: bool) -> None:
    config = tiny_config("qwen2", tied=tied)
    batches = [random_batch(seed, packed=True) for seed in range(3)]
    outcomes = []
    for device in ("cpu", "cuda"):
        with local_compute(config, device=device, activation_bytes=1 << 14) as run:
            results = [run.step(step, batch) for step, batch in enumerate(batches, 1)]
            outcomes.append((results, run.gradients()))
    for on_cpu, on_gpu in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-5)
        assert on_gpu.grad_norm == pytest.approx(on_cpu.grad_norm, rel=1e-4)
        assert on_gpu.gpu_peak_bytes > 0
    for name, gradient in outcomes[0][1].items():
        torch.testing.assert_close(outcomes[1][1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"decoder_slots": 1},
        {"activation_bytes": 1 << 16},
        {"device_gradients": 4},
        {"boundary_every": 2, "decoder_slots": 3, "activation_bytes": 1 << 14},
        {"waves": 3},
        {"waves": 4, "boundary_every": 3, "decoder_slots": 1, "activation_bytes": 1 << 14},
    ],
    ids=str,
)
def test_where_things_lie_changes_no_bit_on_the_gpu(options: dict[str, Any]) -> None:
    outcomes = []
    for chosen in ({}, options):
        with local_compute(tiny_config("llama"), device="cuda", deterministic=True, **chosen) as run:
            results = [run.step(step, random_batch(step, micro_batches=4)) for step in range(1, 6)]
            outcomes.append(([(result.loss, result.grad_norm) for result in results], run.moments_and_weights()))
    assert outcomes[0] == outcomes[1]


def test_reserved_memory_is_flat_from_step_to_step() -> None:
    with local_compute(tiny_config("llama"), device="cuda", activation_bytes=1 << 14) as run:
        reserved = []
        for step in range(1, 41):
            run.step(step, random_batch(step))
            reserved.append(torch.cuda.memory_reserved())
        assert len(set(reserved[3:])) == 1


def test_memory_that_cannot_be_registered_is_an_error_that_names_the_limit() -> None:
    # In a process of its own: the driver's refusal stays behind as the last CUDA error.
    code = (
        "import torch\n"
        "from pipeline.compute.device import register_host_memory\n"
        "torch.cuda.init()\n"
        "memory = torch.zeros(1 << 20, dtype=torch.uint8)\n"
        "register_host_memory(memory.data_ptr(), memory.nbytes)\n"
        "register_host_memory(memory.data_ptr(), memory.nbytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "PipelineError: cannot register" in done.stderr and "ulimit -l" in done.stderr
