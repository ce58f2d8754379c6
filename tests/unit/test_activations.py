"""Boundary activations come back as they were, from the device or from the host."""

from __future__ import annotations

import torch

from pipeline.compute.activations import Boundaries
from pipeline.compute.streams import open_streams

CPU = torch.device("cpu")
SHAPE = (2, 3, 8)
BOUNDARY_BYTES = 2 * 2 * 3 * 8 * 2


def micro_batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(2)]


def test_backward_takes_what_forward_kept_and_nothing_stays() -> None:
    boundaries = Boundaries(open_streams(CPU))
    kept = {layer: micro_batches(layer) for layer in (1, 2, 3)}
    for layer, tensors in kept.items():
        boundaries.keep(0, layer, list(tensors))
        assert boundaries.read(0, layer) == tensors
        boundaries.leave(0, layer)
    for layer in (3, 2, 1):
        assert boundaries.take(0, layer) == kept[layer]
    assert not boundaries._kept


def test_spilled_boundaries_return_bit_equal_and_free_the_device_between() -> None:
    room = torch.zeros(2 * BOUNDARY_BYTES, dtype=torch.uint8)
    boundaries = Boundaries(open_streams(CPU), room)
    for step in (0, 1):
        kept = {layer: micro_batches(10 * step + layer) for layer in (1, 2, 3)}
        for layer, tensors in kept.items():
            boundaries.keep(step, layer, list(tensors), piece=layer - 1)
            boundaries.leave(step, layer)
        assert not boundaries._kept[step, 1].tensors and not boundaries._kept[step, 2].tensors
        assert boundaries.read(step, 3) == kept[3], "no room for a third: it stays on the device"
        for layer in (3, 2, 1):
            taken = boundaries.take(step, layer)
            boundaries.prefetch(step, layer - 1)
            assert all(torch.equal(a, b) for a, b in zip(taken, kept[layer], strict=True))


def test_evaluation_leaves_the_room_to_the_step_in_training() -> None:
    room = torch.zeros(BOUNDARY_BYTES, dtype=torch.uint8)
    boundaries = Boundaries(open_streams(CPU), room)
    boundaries.keep(-1, 1, micro_batches(0))
    assert not room.any()
    assert len(boundaries.take(-1, 1)) == 2


def test_two_steps_in_flight_keep_their_own_inputs() -> None:
    boundaries = Boundaries(open_streams(CPU))
    boundaries.keep(0, 1, micro_batches(1))
    boundaries.keep(1, 1, micro_batches(2))
    assert torch.equal(boundaries.take(1, 1)[0], micro_batches(2)[0])
    assert torch.equal(boundaries.take(0, 1)[0], micro_batches(1)[0])
