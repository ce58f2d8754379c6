"""Random initialisation depends on the seed and the tensor's name, and on nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.masters import master_of
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.initialise import BLOCK_ELEMENTS, draw_block, initialise_layer
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

NORMAL = TensorSpec("model.embed_tokens.weight", (1000, 100), 0, True, InitKind.NORMAL, 0.02)
ONES = TensorSpec("model.norm.weight", (100,), 0, False, InitKind.ONES)
ZEROS = TensorSpec("model.layers.0.self_attn.q_proj.bias", (77,), 0, False, InitKind.ZEROS)


def plan_of(
    *layers: list[TensorSpec], precision: Precision = Precision.BF16, home: LayerHome | None = None
) -> TierPlan:
    layouts = [
        LayerLayout(index, f"layer-{index:04}", LayerKind.DECODER, *place_tensors(tensors))
        for index, tensors in enumerate(layers)
    ]
    model = ModelLayout(tuple(layouts), precision, tied=True)
    return TierPlan(model, (home or LayerHome(),) * len(layouts), ElementType.FLOAT32)


def masters(plan: TierPlan, seed: int, *, threads: int = 1, order: int = 1) -> dict[str, np.ndarray]:
    """Initialise over an arena full of rubbish, in layer order or reversed; return each tensor's master."""
    arena_map = ArenaMap.of(plan)
    found = {}
    with Arena.create(arena_map.total_bytes, threads=1) as arena:
        arena.bytes_view(0, arena.num_bytes)[:] = 0xEE
        for layer in plan.model.layers[::order]:
            initialise_layer(arena, arena_map, layer, seed, threads)
            state = LayerState.of(arena, arena_map, layer)
            everything = master_of(state)
            for tensor in layer.tensors:
                found[tensor.name] = everything[tensor.offset : tensor.offset + tensor.numel].copy()
                everything[tensor.offset : tensor.offset + tensor.numel] = 0
            assert not everything.any(), "padding is zero"
            assert not any(moment.any() for moment in state.moments)
    return found


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("home", [LayerHome(), LayerHome(None, 0), LayerHome(0, 0)])
def test_values_do_not_depend_on_threads_order_precision_or_placement(precision: Precision, home: LayerHome) -> None:
    reference = masters(plan_of([NORMAL], [ONES, ZEROS]), 7)
    other = masters(plan_of([ONES], [ZEROS, NORMAL], precision=precision, home=home), 7, threads=3, order=-1)
    assert reference.keys() == other.keys()
    for name, values in reference.items():
        assert np.array_equal(values, other[name]), name


def test_ones_are_one_and_zeros_zero() -> None:
    found = masters(plan_of([ONES, ZEROS]), 0)
    assert (found[ONES.name] == 1).all() and (found[ZEROS.name] == 0).all()


def test_normals_have_the_asked_mean_and_deviation() -> None:
    values = masters(plan_of([NORMAL]), 3)[NORMAL.name].astype(np.float64)
    assert abs(values.mean()) < 5 * NORMAL.std / math.sqrt(values.size)
    assert values.std() == pytest.approx(NORMAL.std, rel=0.02)


def test_seeds_names_and_blocks_have_streams_of_their_own() -> None:
    large = TensorSpec("large", (2 * BLOCK_ELEMENTS + 5,), 0, True, InitKind.NORMAL, 1.0)
    renamed = TensorSpec("renamed", large.shape, 0, True, InitKind.NORMAL, 1.0)
    draws = [draw_block(large, 0, 0), draw_block(large, 1, 0), draw_block(large, 0, 1), draw_block(renamed, 0, 0)]
    draws.append(draw_block(large, 2**64 - 1, 0))
    for one in range(len(draws)):
        for other in range(one):
            assert abs(np.corrcoef(draws[one], draws[other])[0, 1]) < 0.006  # 6 standard deviations at 2^20 draws
    assert draw_block(large, 0, 2).size == 5


def test_a_tensor_of_several_blocks_is_its_blocks_in_order() -> None:
    large = TensorSpec("large", (3, BLOCK_ELEMENTS // 2 + 11), 0, True, InitKind.NORMAL, 0.5)
    values = masters(plan_of([large]), 5, threads=2)[large.name]
    assert np.array_equal(values[:BLOCK_ELEMENTS], draw_block(large, 5, 0))
    assert np.array_equal(values[BLOCK_ELEMENTS:], draw_block(large, 5, 1))


def test_a_seed_means_the_same_values_tomorrow() -> None:
    expected = [-0.0689830556511879, -0.027526745572686195, 0.024099992588162422, -0.0029860895592719316]
    assert draw_block(NORMAL, 42, 0)[:4].tolist() == expected


def test_the_streaming_copy_of_a_layer_on_nvme_is_not_touched() -> None:
    plan = plan_of([NORMAL], home=LayerHome(0, 0))
    arena_map = ArenaMap.of(plan)
    with Arena.create(arena_map.total_bytes, threads=1) as arena:
        initialise_layer(arena, arena_map, plan.model.layers[0], 0)
        assert not arena.view(arena_map.weights[0]).any()
        assert arena.view(arena_map.states[0][Buffer.WEIGHT]).any()
