"""The device's update gives the bits of the host's kernel, denormals and extreme sizes included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.updates.adamw import OptimizerSettings, Scalars, update
from tiers.master import split_master

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def random_state(n: int = 1_000_003) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.uniform(-60, 10, n)).astype(np.float32)
    weight, exp_avg, gradient = (rng.standard_normal(n, dtype=np.float32) * scale for _ in range(3))
    return [weight, exp_avg, np.square(rng.standard_normal(n, dtype=np.float32) * scale), gradient]


def edge_state(n: int = 200_000) -> list[np.ndarray]:
    edges = [0, 1e-45, -1e-45, 1e-40, 1.1754942e-38, 1.17549435e-38, -1e-20, 1e-8, 1, -3e8, 1e9]
    rng = np.random.default_rng(1)
    weight, exp_avg, exp_avg_sq, gradient = (rng.choice(np.array(edges, np.float32), n) for _ in range(4))
    return [weight, exp_avg, np.abs(exp_avg_sq), gradient]


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("bf16_gradient", [True, False], ids=["bf16-gradient", "fp32-gradient"])
@pytest.mark.parametrize("state", [random_state(), edge_state()], ids=["random", "edges"])
@pytest.mark.parametrize("step", [1, 1000])
def test_every_bit_is_that_of_the_host(step: int, state: list[np.ndarray], bf16_gradient: bool, split: bool) -> None:
    from pipeline.updates.adamw_cuda import update_on_gpu

    scalars = Scalars.of(SETTINGS, lr=3e-4, applied_steps=step, clip_coefficient=0.37, decay=step == 1)
    weight, exp_avg, exp_avg_sq, gradient = (array.copy() for array in state)
    if bf16_gradient:
        gradient = (gradient.view(np.uint32) >> 16).astype(np.uint16)
    low = None
    if split:
        high, low = np.empty(weight.size, np.uint16), np.empty(weight.size, np.int16)
        split_master(weight, high, low)
        weight = high
    on_host = [array for array in (weight, low, exp_avg, exp_avg_sq, gradient) if array is not None]
    on_device = [torch.from_numpy(array.copy()).cuda() for array in on_host]
    as_given = [t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for t in on_device]
    device_weight, *device_low, m, v, g = as_given
    update_on_gpu(device_weight, device_low[0] if device_low else None, m, v, g, scalars)
    update(weight, low, exp_avg, exp_avg_sq, gradient, scalars)
    for got, wanted in zip(on_device, on_host, strict=True):
        bits = np.uint16 if wanted.itemsize == 2 else np.uint32
        different = np.flatnonzero(got.cpu().numpy().view(bits) != wanted.view(bits))
        assert different.size == 0, f"{different.size} differ, first {different[:3]}"
