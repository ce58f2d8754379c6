"""The split master inverts exactly for every kind of bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.masters import master_of
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.layout import (
    ElementType,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    place_tensors,
)
from tiers.master import LayerState, join_master, split_master

EDGE_HIGH_HALVES = (
    0x0000,  # zeros and subnormals
    0x0001,
    0x007F,
    0x0080,  # smallest normal
    0x3F7F,
    0x3F80,  # one
    0x7F7F,  # largest finite
    0x7F80,  # infinity, signalling NaNs
    0x7FBF,
    0x7FC0,  # quiet NaN
    0x7FFF,  # NaNs whose rounding carries into the sign
    0x8000,
    0x8001,
    0xBF80,
    0xFF7F,
    0xFF80,
    0xFFC0,
    0xFFFF,  # NaNs whose rounding carries out of the word
)


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = np.empty(bits.shape, np.uint16), np.empty(bits.shape, np.int16)
    split_master(bits.view(np.float32), high, low)
    return high, low


@pytest.mark.parametrize("high_half", EDGE_HIGH_HALVES, ids=hex)
def test_every_low_half_of_edge_patterns_round_trips(high_half: int) -> None:
    bits = np.arange(2**16, dtype=np.uint32) + np.uint32(high_half << 16)
    assert np.array_equal(join_master(*split(bits)).view(np.uint32), bits)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_pattern_round_trips(patterns: list[int]) -> None:
    bits = np.array(patterns, np.uint32)
    assert np.array_equal(join_master(*split(bits)).view(np.uint32), bits)


def test_the_high_half_is_the_nearest_bfloat16() -> None:
    values = np.random.default_rng(0).standard_normal(100_000, np.float32)
    high, _ = split(values.view(np.uint32))
    ours = torch.from_numpy(high.view(np.int16)).view(torch.bfloat16)
    nearest = torch.from_numpy(values).to(torch.bfloat16)
    ties = (values.view(np.uint32) & 0xFFFF) == 0x8000  # torch rounds these to even, the split away from zero
    assert torch.equal(ours[torch.from_numpy(~ties)], nearest[torch.from_numpy(~ties)])


def test_a_bfloat16_value_has_a_zero_low_half() -> None:
    bits = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    high, low = split(bits)
    assert not low.any() and np.array_equal(high, (bits >> np.uint32(16)).astype(np.uint16))


def test_splitting_leaves_its_input_alone() -> None:
    values = np.array([1.5, -2.75, np.pi], np.float32)
    before = values.copy()
    split(values.view(np.uint32))
    assert np.array_equal(values, before)


@pytest.mark.parametrize("precision", list(Precision))
def test_a_layers_state_reads_what_was_written_and_clears_the_rest(precision: Precision) -> None:
    tensors, numel = place_tensors(
        [TensorSpec(name, (5, 7), 0, True, InitKind.NORMAL, 1.0) for name in ("first", "second")]
    )
    model = ModelLayout((LayerLayout(0, "embedding", LayerKind.EMBEDDING, tensors, numel),), precision, tied=False)
    arena_map = ArenaMap.of(TierPlan(model, (LayerHome(),), ElementType.FLOAT32))
    values = np.random.default_rng(1).standard_normal(35, np.float32)
    with Arena.create(arena_map.total_bytes, threads=1) as arena:
        arena.bytes_view(0, arena.num_bytes)[:] = 0xAB
        state = LayerState.of(arena, arena_map, model.layers[0])
        state.clear_padding()
        state.clear_moments()
        for tensor in tensors:
            state.write_float32(tensor.offset, values)
        everything = master_of(state)
        for tensor in tensors:
            assert np.array_equal(everything[tensor.offset : tensor.offset + 35], values)
        assert np.count_nonzero(everything) == 70
        assert not any(moment.any() for moment in state.moments)
