"""A step in waves, or with every K-th boundary kept, ends with the bits of a step that passes each layer once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.inline import Case, inline_run
from support.tiny import random_batch, tiny_config
from tiers.layout import ElementType, Precision

STEPS = 3
LAYERS = tuple(range(7))


def train(case: Case) -> tuple[list[tuple[float, float]], list[bytes]]:
    """Loss and norm of each step; then every bit of the weights. Five micro-batches are no whole number of waves."""
    with inline_run(case) as run:
        results = run.train([random_batch(seed, micro_batches=5, micro_batch=1, packed=True) for seed in range(STEPS)])
        weights = [weight.numpy().tobytes() for weight in run.weights().values()]
    return [(result.loss, result.grad_norm) for result in results], weights


def case_of(precision: Precision, tied: bool, max_grad_norm: float | None) -> Case:
    return Case(tiny_config("qwen2", tied=tied), precision, max_grad_norm, gradients=ElementType.FLOAT32)


@cache
def in_one_wave(precision: Precision, tied: bool, max_grad_norm: float | None) -> tuple[Any, list[bytes]]:
    return train(case_of(precision, tied, max_grad_norm))


@pytest.mark.parametrize(
    ("precision", "tied", "max_grad_norm"),
    [
        (Precision.FP32, False, None),
        (Precision.FP32, True, 0.5),
        (Precision.BF16, False, 0.5),
        (Precision.BF16, True, None),
    ],
    ids=["fp32-untied-unclipped", "fp32-tied-clipped", "bf16-untied-clipped", "bf16-tied-unclipped"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"waves": 2},
        {"waves": 5, "boundary_every": 3, "decoder_slots": 1},
        {"waves": 2, "kept_layers": 2, "boundary_every": 2, "activation_bytes": 1 << 13},
        {"waves": 2, "kept_layers": 5, "own_slots": 3},
        {"boundary_every": 9},
        {"boundary_every": 2, "kept_layers": 1, "activation_bytes": 1 << 13},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_waves_and_thinned_boundaries_leave_every_bit(
    options: dict[str, Any], precision: Precision, tied: bool, max_grad_norm: float | None
) -> None:
    case = replace(case_of(precision, tied, max_grad_norm), **options)
    assert train(case) == in_one_wave(precision, tied, max_grad_norm)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_layers_that_are_updated_on_the_device_keep_their_sums_in_ram(tied: bool) -> None:
    case = replace(case_of(Precision.BF16, tied, 0.5), waves=3, device_updates=(0, 1, 2), boundary_every=2)
    assert train(case) == in_one_wave(Precision.BF16, tied, 0.5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_weights_and_state_on_nvme_stream_again_for_every_wave(max_grad_norm: float | None, tmp_path: Path) -> None:
    case = case_of(Precision.BF16, False, max_grad_norm)
    options = {"state_on_nvme": LAYERS, "weights_on_nvme": LAYERS, "nvme_dir": tmp_path, "waves": 2}
    assert train(replace(case, **options)) == in_one_wave(Precision.BF16, False, max_grad_norm)
