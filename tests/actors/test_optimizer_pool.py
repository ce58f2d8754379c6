from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ray

from pipeline.messages import Lane, StepControl
from pipeline.updates import adamw
from pipeline.updates.adamw import OptimizerSettings, Scalars
from pipeline.updates.optimizer_pool import Optimizer, OptimizerActor, decay_runs, part_of
from support.masters import master_of
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.layout import (
    Buffer,
    ElementType,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    place_tensors,
)
from tiers.master import LayerState
from tiers.parameter_tier import ParameterTier, ParameterTierActor, TierHandle

SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def layer(index: int, *tensors: tuple[str, tuple[int, ...]]) -> LayerLayout:
    placed, numel = place_tensors(
        [TensorSpec(name, shape, 0, len(shape) > 1, InitKind.NORMAL, 0.02) for name, shape in tensors]
    )
    return LayerLayout(index, f"layer-{index:04d}", LayerKind.DECODER, placed, numel)


BLOCK = layer(
    0,
    ("input_layernorm.weight", (96,)),
    ("q_proj.weight", (96, 96)),
    ("q_proj.bias", (96,)),
    ("q_norm.weight", (24,)),
    ("o_proj.weight", (96, 96)),
    ("up_proj.weight", (200, 96)),
    ("post_attention_layernorm.weight", (96,)),
)
TINY = layer(1, ("norm.weight", (5,)))


def tier_plan(precision: Precision) -> TierPlan:
    gradient = ElementType.BFLOAT16 if precision is Precision.BF16 else ElementType.FLOAT32
    homes = (LayerHome(), LayerHome(gradient_slot=1))
    return TierPlan(ModelLayout((BLOCK, TINY), precision, False), homes, gradient)


def fill(arena: Arena, arena_map: ArenaMap, seed: int) -> None:
    """Random masters, zero moments, random gradients; zeros in the padding."""
    rng = np.random.default_rng(seed)
    for layout in arena_map.plan.model.layers:
        state = LayerState.of(arena, arena_map, layout)
        state.clear_moments()
        fill_gradient(arena, arena_map, layout, rng)
        for tensor in layout.tensors:
            state.write_float32(tensor.offset, rng.standard_normal(tensor.numel, dtype=np.float32))


def fill_gradient(arena: Arena, arena_map: ArenaMap, layout: LayerLayout, rng: np.random.Generator) -> None:
    gradient = arena.view(arena_map.gradients[layout.index])
    gradient[:] = 0
    for tensor in layout.tensors:
        values = rng.standard_normal(tensor.numel, dtype=np.float32)
        stored = values if gradient.dtype == np.float32 else (values.view(np.uint32) >> 16).astype(np.uint16)
        gradient[tensor.offset : tensor.offset + tensor.numel] = stored


def every_bit(arena: Arena, arena_map: ArenaMap) -> list[bytes]:
    return [arena.view(extent).tobytes() for state in arena_map.states for extent in state.values()]


@contextmanager
def open_tier(precision: Precision, seed: int = 0) -> Iterator[tuple[TierHandle, Arena, ArenaMap]]:
    tier: Any = ParameterTier(tier_plan(precision), threads=1)
    handle: TierHandle = tier.handle()
    arena, arena_map = handle.attach()
    try:
        fill(arena, arena_map, seed)
        yield handle, arena, arena_map
    finally:
        arena.close()
        tier.close()


@contextmanager
def pool(handle: TierHandle, parts: int, threads: int, settings: OptimizerSettings = SETTINGS) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Optimizer(handle, settings, part, parts, threads)) for part in range(parts)]


def control(applied_steps: int = 1, lr: float = 1e-2, clip: float = 0.25, *, applied: bool = True) -> StepControl:
    return StepControl(applied, applied_steps, lr, clip)


def trained(precision: Precision, parts: int, threads: int, steps: int = 3) -> list[bytes]:
    with open_tier(precision) as (handle, arena, arena_map), pool(handle, parts, threads) as optimizers:
        for step in range(1, steps + 1):
            for index in (0, 1):
                for optimizer in optimizers:
                    optimizer.update(step, index, control(step))
        return every_bit(arena, arena_map)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("parts", "threads"), [(1, 2), (3, 1), (3, 2), (40, 1)])
def test_every_bit_is_the_same_for_any_number_of_parts_and_threads(
    precision: Precision, parts: int, threads: int
) -> None:
    assert trained(precision, parts, threads) == trained(precision, 1, 1)


@pytest.mark.parametrize("numel", [0, 1, 2048, 4096, 4097, 40_960, 1_000_000])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 300])
def test_parts_cover_every_element_once_and_share_no_page(numel: int, parts: int) -> None:
    ranges = [part_of(numel, part, parts) for part in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start
        assert start % 4096 == 0 or start == numel


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    """B59, by name."""
    runs = decay_runs(BLOCK)
    assert [(run.decay, run.names) for run in runs] == [
        (False, ("input_layernorm.weight",)),
        (True, ("q_proj.weight",)),
        (False, ("q_proj.bias", "q_norm.weight")),
        (True, ("o_proj.weight", "up_proj.weight")),
        (False, ("post_attention_layernorm.weight",)),
    ]
    assert runs[0].start == 0
    assert runs[-1].stop == BLOCK.numel
    assert all(first.stop == second.start for first, second in pairwise(runs))


@pytest.mark.parametrize("precision", list(Precision))
def test_decay_moves_matrices_alone_when_the_gradient_is_zero(precision: Precision) -> None:
    with open_tier(precision) as (handle, arena, arena_map), pool(handle, 2, 1) as optimizers:
        arena.view(arena_map.gradients[0])[:] = 0
        state = LayerState.of(arena, arena_map, BLOCK)
        before = master_of(state)
        for optimizer in optimizers:
            optimizer.update(1, 0, control())
        after = master_of(state)
    keep = np.float32(1 - 1e-2 * SETTINGS.weight_decay)
    for tensor in BLOCK.tensors:
        place = slice(tensor.offset, tensor.offset + tensor.numel)
        np.testing.assert_array_equal(
            after[place], before[place] * keep if tensor.decay else before[place], tensor.name
        )


def test_padding_stays_zero() -> None:
    with open_tier(Precision.BF16) as (handle, arena, arena_map), pool(handle, 1, 1) as (optimizer,):
        optimizer.update(1, 0, control())
        inside = np.zeros(BLOCK.numel, bool)
        for tensor in BLOCK.tensors:
            inside[tensor.offset : tensor.offset + tensor.numel] = True
        for buffer, extent in arena_map.states[0].items():
            assert not arena.view(extent)[~inside].any(), buffer


@pytest.mark.parametrize("precision", list(Precision))
def test_step_that_is_not_applied_leaves_every_bit(precision: Precision) -> None:
    with open_tier(precision) as (handle, arena, arena_map), pool(handle, 2, 2) as optimizers:
        before = every_bit(arena, arena_map)
        arena.view(arena_map.gradients[0])[:7] = np.array(np.nan, np.float32) if precision is Precision.FP32 else 0x7FC0
        for optimizer in optimizers:
            span = optimizer.update(1, 0, control(0, applied=False))
            assert span.num_bytes == 0
        assert every_bit(arena, arena_map) == before


def test_bias_correction_follows_the_count_of_applied_steps_not_the_calls() -> None:
    """B62: three steps, a new process, one more step equals four; a skipped step in between does not count."""
    straight = trained(Precision.BF16, 1, 1, steps=4)
    with open_tier(Precision.BF16) as (handle, arena, arena_map):
        with pool(handle, 1, 1) as (first,):
            for step in (1, 2, 3):
                for index in (0, 1):
                    first.update(step, index, control(step))
        with pool(handle, 2, 1) as after_restart:
            for optimizer in after_restart:
                for index in (0, 1):
                    optimizer.update(4, index, control(3, applied=False))
                    optimizer.update(5, index, control(4))
        assert every_bit(arena, arena_map) == straight


def test_updates_below_bf16_resolution_reach_the_streamed_weight() -> None:
    """B56, B57: the arena holds an fp32 master whose upper half is what the device streams."""
    still = OptimizerSettings(SETTINGS.betas, SETTINGS.eps, 0.0)
    with open_tier(Precision.BF16) as (handle, arena, arena_map), pool(handle, 1, 1, still) as (optimizer,):
        state = LayerState.of(arena, arena_map, TINY)
        state.write_float32(0, np.ones(5, np.float32))
        arena.view(arena_map.gradients[1])[:5] = 0x3F80
        for step in range(1, 101):
            optimizer.update(step, 1, control(step, lr=6e-4, clip=1.0))
        master = master_of(state)[:5]
        assert master == pytest.approx(np.full(5, 0.94), abs=1e-4)
        streamed = (arena.view(arena_map.weights[1])[:5].astype(np.uint32) << 16).view(np.float32)
        assert streamed == pytest.approx(master, rel=2**-8)


def test_fp32_update_is_the_kernel_over_each_tensor() -> None:
    with open_tier(Precision.FP32) as (handle, arena, arena_map), pool(handle, 3, 1) as optimizers:
        state = LayerState.of(arena, arena_map, BLOCK)
        weight = state.weight.copy()
        gradient = arena.view(arena_map.gradients[0]).copy()
        for optimizer in optimizers:
            optimizer.update(1, 0, control())
        for tensor in BLOCK.tensors:
            place = slice(tensor.offset, tensor.offset + tensor.numel)
            constants = Scalars.of(SETTINGS, lr=1e-2, applied_steps=1, clip_coefficient=0.25, decay=tensor.decay)
            zeros = np.zeros((2, tensor.numel), np.float32)
            adamw.update(weight[place], None, zeros[0], zeros[1], gradient[place], constants)
            np.testing.assert_array_equal(state.weight[place], weight[place], tensor.name)


def test_span_tells_what_was_done() -> None:
    with open_tier(Precision.BF16) as (handle, _, _), pool(handle, 2, 1) as optimizers:
        spans = [optimizer.update(1, 0, control()) for optimizer in optimizers]
    assert {(span.name, span.lane) for span in spans} == {("update[0]", Lane.UPDATE)}
    assert [span.actor for span in spans] == ["optimizer-0", "optimizer-1"]
    assert all(span.start_s <= span.end_s for span in spans)
    # 12 bytes of master and moments read and written, 2 of gradient read.
    assert sum(span.num_bytes for span in spans) == BLOCK.numel * 26


@pytest.mark.ray
def test_actors_of_other_processes_update_the_same_memory(ray_local: None) -> None:
    tier: Any = ParameterTierActor.options(num_cpus=0).remote(tier_plan(Precision.BF16), threads=1)
    handle: TierHandle = ray.get(tier.handle.remote())
    arena, arena_map = handle.attach()
    assert Buffer.WEIGHT_LOW in arena_map.states[0]
    fill(arena, arena_map, 0)
    actors: list[Any] = [OptimizerActor.options(num_cpus=0).remote(handle, SETTINGS, part, 2, 1) for part in range(2)]
    try:
        for step in (1, 2, 3):
            spans = ray.get([actor.update.remote(step, index, control(step)) for actor in actors for index in (0, 1)])
            assert len(spans) == 4
        assert every_bit(arena, arena_map) == trained(Precision.BF16, 1, 1)
    finally:
        ray.get([actor.close.remote() for actor in actors])
        arena.close()
        for actor in [*actors, tier]:
            ray.kill(actor)
