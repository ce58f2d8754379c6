"""A step is applied only when its numbers are finite, and the control says how."""

from __future__ import annotations

import math

import pytest

from pipeline.compute.outcome import decide, first_non_finite, global_norm, report
from pipeline.messages import StepControl
from pipeline.updates.learning_rate import LearningRate

RATE = LearningRate("linear", base=1e-3, warmup_steps=10, total_steps=100)
START = StepControl(applied=True, applied_steps=4, lr=0.0, clip_coefficient=1.0)


def test_an_applied_step_counts_and_uses_the_rate_of_its_own_number() -> None:
    control = decide(START, RATE, loss=2.0)
    assert control == StepControl(True, 5, RATE.at(5), 1.0)


@pytest.mark.parametrize(("norm", "limit"), [(4.0, 1.0), (0.5, 1.0), (1.0, 1.0)])
def test_clipping_is_that_of_torch(norm: float, limit: float) -> None:
    control = decide(START, RATE, 2.0, norm, limit)
    assert control.clip_coefficient == min(1.0, limit / (norm + 1e-6))


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, None), (math.inf, None), (2.0, math.nan), (2.0, math.inf), (math.nan, 1.0)]
)
def test_a_step_that_is_not_finite_is_not_applied_and_not_counted(loss: float, norm: float | None) -> None:
    control = decide(START, RATE, loss, norm, 1.0)
    assert not control.applied
    assert control.applied_steps == 4
    assert control.clip_coefficient == 1.0
    assert decide(control, RATE, 2.0).applied_steps == 5


def test_the_first_bad_layer_is_named() -> None:
    names = ["embedding", "layer-0001", "head"]
    assert first_non_finite(2.0, [1.0, math.inf, math.nan], names) == "layer-0001"
    assert first_non_finite(math.nan, [1.0, math.inf, math.nan], names) == "loss"
    assert first_non_finite(2.0, [1.0, 1.0, 1.0], names) is None


def test_the_norm_is_exact_and_never_hides_a_bad_layer() -> None:
    assert global_norm([9.0, 16.0]) == 5.0
    assert math.isinf(global_norm([1.0, math.inf]))
    assert math.isnan(global_norm([math.inf, math.nan]))
    result = report(START, 2.0, [math.nan], ["head"], gpu_peak_bytes=7, compiled_graphs=0)
    assert math.isnan(result.grad_norm) and result.non_finite == "head" and result.loss == 2.0
