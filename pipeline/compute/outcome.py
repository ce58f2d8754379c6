"""Whether and how a step is applied: pure policy over the numbers that Compute has read back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.messages import StepControl, StepResult
from pipeline.updates.learning_rate import LearningRate

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def decide(
    previous: StepControl,
    learning_rate: LearningRate,
    loss: float,
    grad_norm: float | None = None,
    max_grad_norm: float | None = None,
) -> StepControl:
    """Decide on the updates of a step.

    Args:
        previous: Of the step before, or of the checkpoint a run starts from.
        learning_rate: Its schedule.
        loss: Of the step.
        grad_norm: Global norm, where clipping needs it; a step whose norm is not finite is not applied.
        max_grad_norm: Limit of the norm; None for no clipping.

    Returns:
        The control. A step that is not applied carries the rate it would have used and a coefficient of 1.
    """
    applied = math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm))
    coefficient = 1.0
    if applied and grad_norm is not None and max_grad_norm is not None:
        coefficient = min(1.0, max_grad_norm / (grad_norm + CLIP_EPSILON))
    attempted = previous.applied_steps + 1
    return StepControl(
        applied, attempted if applied else previous.applied_steps, learning_rate.at(attempted), coefficient
    )


def global_norm(sums_of_squares: Sequence[float]) -> float:
    """L2 norm over all layers, from each layer's sum of squares; summed in fp64 without rounding between layers."""
    if not all(math.isfinite(value) for value in sums_of_squares):
        return math.nan if any(math.isnan(value) for value in sums_of_squares) else math.inf
    return math.sqrt(math.fsum(sums_of_squares))


def first_non_finite(loss: float, sums_of_squares: Sequence[float], layer_names: Sequence[str]) -> str | None:
    """Name what is not finite: `loss`, else the first layer in forward order; None where all is finite."""
    if not math.isfinite(loss):
        return "loss"
    for name, value in zip(layer_names, sums_of_squares, strict=True):
        if not math.isfinite(value):
            return name
    return None


def report(
    control: StepControl,
    loss: float,
    sums_of_squares: Sequence[float],
    layer_names: Sequence[str],
    *,
    gpu_peak_bytes: int,
    compiled_graphs: int,
) -> StepResult:
    """Put together what a finished step reports."""
    return StepResult(
        control=control,
        loss=loss,
        grad_norm=global_norm(sums_of_squares),
        non_finite=first_non_finite(loss, sums_of_squares, layer_names),
        gpu_peak_bytes=gpu_peak_bytes,
        compiled_graphs=compiled_graphs,
    )
