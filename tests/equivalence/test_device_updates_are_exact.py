"""Layers that are updated on the device, in the slot where they lie, end with the bits that the host's update gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from pipeline.messages import StepControl
from pipeline.schedule import build_step
from pipeline.step.operations import Op
from support.inline import Case, inline_run
from support.tiny import random_batch, tiny_config
from tiers.layout import Precision

STEPS = 5


def train(case: Case) -> tuple[list[tuple[float, float]], list[bytes]]:
    """Loss and norm of each step; then every bit of weights and state."""
    with inline_run(case) as run:
        results = run.train([random_batch(seed, packed=True) for seed in range(STEPS)])
        states = [run.arena.view(extent).tobytes() for state in run.map.states for extent in state.values()]
    return [(result.loss, result.grad_norm) for result in results], states


@cache
def on_the_host(precision: Precision, tied: bool) -> tuple[list[tuple[float, float]], list[bytes]]:
    return train(Case(tiny_config("qwen2", tied=tied), precision, max_grad_norm=0.5))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    "options",
    [
        {"device_updates": (0, 1, 2)},
        {"device_updates": (0,)},
        {"device_updates": (1, 2)},
        {"device_updates": (0, 1), "decoder_slots": 1},
        {"device_updates": (0, 1, 2, 3, 4, 5), "decoder_slots": 5, "device_gradients": 2},
        {"device_updates": (0, 1, 2), "kept_layers": 3},
        {"device_updates": (0, 1, 2), "kept_layers": 5, "in_lent_room": 2},
        {"device_updates": (0, 1, 2), "in_lent_room": 3},
        {"device_updates": (0, 1), "boundary_every": 2, "decoder_slots": 3, "in_lent_room": 2},
        {"device_updates": (0, 1, 2), "kept_layers": 5, "own_slots": 4},
    ],
    ids=str,
)
def test_every_bit_of_weights_and_state_is_the_same(options: dict[str, Any], precision: Precision, tied: bool) -> None:
    case = Case(tiny_config("qwen2", tied=tied), precision, max_grad_norm=0.5)
    assert train(replace(case, **options)) == on_the_host(precision, tied)


def test_a_step_that_is_not_applied_leaves_every_bit() -> None:
    case = Case(tiny_config("llama"), Precision.BF16, device_updates=(0, 1, 2))
    refused = StepControl(applied=False, applied_steps=0, lr=1.0, clip_coefficient=1.0)
    with inline_run(case) as run:
        before = run.weights()
        operations = build_step(run.schedule)
        for operation in operations:
            layer, slot = operation.key.layer, operation.slot
            match operation.key.op:
                case Op.BEGIN:
                    run.compute.begin(1, random_batch(0))
                case Op.STAGE:
                    run.compute.stage(1, layer, slot)
                case Op.FORWARD:
                    run.compute.forward(1, layer, slot)
                case Op.HEAD:
                    run.compute.head(1, slot)
                case Op.BACKWARD:
                    run.compute.backward(1, layer, slot)
                case Op.OFFLOAD:
                    run.compute.offload(1, layer)
                case Op.LEND_STATE:
                    run.compute.lend_state(1, layer)
                case Op.UPDATE_ON_DEVICE:
                    run.compute.update_on_device(1, layer, slot, refused)
                case Op.RETURN_STATE:
                    run.compute.return_state(1, layer, slot)
        after = run.weights()
    assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
