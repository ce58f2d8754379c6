"""A model streamed layer by layer through the GPU trains as the same model that lies in its memory.

Qwen2.5 0.5B in shape, random weights. The resident side is `support.plain_loop`: autograd over the whole model, every
rounding where the pipeline says it has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.compute import ComputeSettings
from pipeline.updates.learning_rate import LearningRate
from support.inline import Case, inline_run
from support.plain_loop import PlainLoop, norm_of
from support.tiny import random_batch
from tiers.layout import Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPE = Path(__file__).parents[2] / "tasks" / "recipes" / "bench" / "shapes" / "qwen2.5-0.5b.json"
STEPS, STEPS_IN_LOCKSTEP = 50, 20
LIMIT = 1.0
"""Of the gradient norm: it is passed in the first steps."""
KEPT = 8
"""Layers that are not recomputed: their weight gradients are rounded by micro-batch, as autograd's are."""


@dataclass(frozen=True)
class OnGpu(Case):
    compiled: bool = False

    def compute_settings(self) -> ComputeSettings:
        return replace(
            super().compute_settings(), device="cuda", compile=self.compiled, deterministic=not self.compiled
        )


@dataclass(frozen=True)
class Curves:
    """Losses of every step, and where the weights of the two sides differed after those in lockstep."""

    streamed: list[float]
    resident: list[float]
    apart: dict[str, float]


def shape() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(SHAPE.read_text())
    return config


def case(**options: Any) -> OnGpu:
    lr = LearningRate("constant", 3e-4, 5, STEPS)
    return OnGpu(shape(), Precision.BF16, LIMIT, lr, threads=8, io_threads=8, kept_layers=KEPT, **options)


def batch_of(step: int) -> Any:
    """Few of the words occur: a loss that starts at ln 151,936 = 11.9 falls to ln 97 = 4.6 in the first steps."""
    return random_batch(step, micro_batches=2, micro_batch=4, sequence=256)


@pytest.fixture(scope="module")
def curves() -> Iterator[Curves]:
    """Both sides in lockstep, then the resident one alone."""
    streamed, resident, apart = [], [], {}
    with inline_run(case()) as run:
        start = run.weights()
        loop = PlainLoop(shape(), start, device="cuda", fp32_products=shape()["num_hidden_layers"] - KEPT)
        for step in range(1, STEPS_IN_LOCKSTEP + 1):
            result = run.step(step, batch_of(step))
            streamed.append(result.loss)
            loss, sums = loop.gradients(batch_of(step))
            resident.append(loss)
            gradients = {name: total.bfloat16() for name, total in sums.items()}
            # The pipeline's coefficient: the norms are sums in different orders.
            loop.update(step, result.control.lr, result.control.clip_coefficient, gradients)
        trained = run.weights()
    for name, weight in loop.master.items():
        if not torch.equal(trained[name].cuda().view(torch.int32), weight.view(torch.int32)):
            apart[name] = float((trained[name].cuda() - weight).abs().max())
    assert any(not torch.equal(trained[name], weight) for name, weight in start.items())
    for step in range(STEPS_IN_LOCKSTEP + 1, STEPS + 1):
        loss, sums = loop.gradients(batch_of(step))
        resident.append(loss)
        clip = min(1.0, LIMIT / (norm_of(sums) + 1e-6))
        loop.update(step, case().lr.at(step), clip, {name: total.bfloat16() for name, total in sums.items()})
    del loop
    torch.cuda.empty_cache()
    yield Curves(streamed, resident, apart)
    torch.use_deterministic_algorithms(False)


def test_with_deterministic_algorithms_every_bit_of_the_master_is_the_same(curves: Curves) -> None:
    """Not compiled; layers that are recomputed and layers that keep their graph."""
    assert not curves.apart
    assert curves.streamed == pytest.approx(curves.resident[:STEPS_IN_LOCKSTEP], rel=1e-5)


def test_compiled_training_with_device_updates_has_the_same_loss_curve(curves: Curves) -> None:
    with inline_run(case(compiled=True, device_updates=(0, 1, 2))) as run:
        losses = [result.loss for result in run.train([batch_of(step) for step in range(1, STEPS + 1)])]
    assert losses[0] == pytest.approx(math.log(shape()["vocab_size"]), rel=0.05)
    assert losses[-1] < 0.8 * losses[0], "it learns"
    assert losses == pytest.approx(curves.resident, rel=0.01)
