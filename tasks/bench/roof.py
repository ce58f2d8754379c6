"""The compute roof: the same layers and head with all weights in device memory, nothing streamed or updated."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.compute import Compute
from pipeline.families.flops import model_flops_per_token
from pipeline.messages import StepControl
from pipeline.schedule import SchedulePlan, build_step
from pipeline.step.operations import Op, Pass
from tasks.bench.synthetic import random_batch
from tasks.preparation import Preparation
from tiers.arena_map import LayerHome, TierPlan
from tiers.parameter_tier import ParameterTier


@dataclass(frozen=True)
class RoofReport:
    """What the device does when it never waits."""

    step_s: float
    model_tflops: float
    gpu_peak_bytes: int


def measure_roof(preparation: Preparation, steps: int) -> RoofReport:
    """Time steps of Compute alone, in this process, with a device slot for every decoder layer."""
    recipe, placed = preparation.recipe, preparation.placement
    model = placed.tier.model
    decoders = len(model.layers) - 2
    # One host slot for all layers: the roof needs weights on the device once and the host never again.
    tier_plan = TierPlan(model, (LayerHome(0, 0, 0),) * len(model.layers), placed.tier.gradient_type)
    # Layers that keep their graph in the steps keep it here. What steps do for want of memory is no part of the roof.
    schedule = dataclasses.replace(
        placed.schedule,
        decoder_slots=decoders,
        own_slots=0,
        weight_slots=(),
        state_slots=(),
        gradient_slots=(),
        device_gradients=(),
        device_updates=(),
        in_lent_room=0,
        boundary_every=1,
        waves=1,
    )
    settings = dataclasses.replace(
        preparation.compute,
        decoder_slots=decoders,
        own_slots=0,
        record_spans=False,
        max_grad_norm=1.0,
        device_updates=(),
        boundary_every=1,
        waves=1,
    )
    # Norm weights as small as the others make activations that a CPU would compute a hundred times slower.
    torch.set_flush_denormal(True)
    tier: Any = ParameterTier(tier_plan)
    handle = tier.handle()
    arena, arena_map = handle.attach()
    try:
        _random_weights(arena.view(max(arena_map.weights, key=lambda extent: extent.numel)), model.precision == "fp32")
        # Called without Ray, whose typing of actor methods knows `.remote()` only.
        compute: Any = Compute(preparation.spec, handle, settings)
        try:
            times_s, peaks = _run(compute, schedule, preparation, steps)
        finally:
            compute.close()
    finally:
        arena.close()
        tier.close()
    step_s = statistics.median(times_s[1:])
    tokens = recipe.train.sequences_per_step * recipe.train.sequence_length
    flops = model_flops_per_token(preparation.spec, recipe.train.sequence_length) * tokens
    return RoofReport(step_s, flops / step_s / 1e12, max(peaks))


def _random_weights(bits: np.ndarray, fp32: bool) -> None:
    """Small normal numbers: products of zeros run faster than real ones."""
    tile = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    values = tile.numpy() if fp32 else tile.bfloat16().view(torch.int16).numpy().view(np.uint16)
    for start in range(0, bits.size, tile.numel()):
        bits[start : start + tile.numel()] = values[: bits.size - start]


def _run(compute: Any, schedule: SchedulePlan, preparation: Preparation, steps: int) -> tuple[list[float], list[int]]:
    control = StepControl(applied=True, applied_steps=0, lr=0.0, clip_coefficient=1.0)
    operations = build_step(dataclasses.replace(schedule, clip=True))
    times_s, peaks = [], []
    for step in range(1, steps + 2):
        batch = random_batch(preparation.recipe, preparation.spec.vocab_size, step)
        started_s = time.monotonic()
        for operation in operations:
            key, slot = operation.key, operation.slot
            decoder = slot >= 0
            match key.op:
                case Op.BEGIN:
                    compute.begin(step, batch)
                case Op.STAGE if key.pass_ is Pass.FORWARD and (step == 1 or not decoder):
                    compute.stage(step, key.layer, slot)
                case Op.FORWARD:
                    compute.forward(step, key.layer, slot)
                case Op.HEAD:
                    compute.head(step, slot)
                case Op.BACKWARD:
                    compute.backward(step, key.layer, slot)
                case Op.OFFLOAD:
                    compute.discard(step, key.layer)
                case Op.NORM:
                    control, result = compute.norm(step, control)
                    peaks.append(result.gpu_peak_bytes)
        times_s.append(time.monotonic() - started_s)
        print(f"roof step {step}: {times_s[-1]:.3f} s", file=sys.stderr, flush=True)
    return times_s[1:], peaks
