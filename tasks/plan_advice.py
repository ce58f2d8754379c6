"""What would make a planned run faster: single changes of the recipe, each placed and simulated as the plan is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.placement import Placement, PlacementRequest
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Hardware
from pipeline.prediction.placement_choice import choose
from pipeline.prediction.simulate import Prediction, simulate

WORTHWHILE = 1.1
"""Tokens a second, as a multiple of the plan's, from which a change is told: each changes what a run learns."""


@dataclass(frozen=True)
class Advice:
    """One change."""

    setting: str
    """Key and value, as a recipe or `--set` takes them."""
    speedup: float
    """Tokens a second, as a multiple of the plan's."""
    but: str
    """What it changes besides."""


def advice(
    request: PlacementRequest, placement: Placement, prediction: Prediction, hardware: Hardware
) -> tuple[Advice, ...]:
    """Changes that pay, the best first; what is held of a step is what the plan holds: choosing anew takes too long."""
    pace = request.step.tokens / prediction.step_s
    request = replace(request, boundary_every=placement.schedule.boundary_every, waves=placement.schedule.waves)
    found = []
    for changed, setting, but in _changes(request):
        fit = choose(changed, placement.budget, hardware)
        if isinstance(fit, Placement):
            step_s = simulate(CostModel(fit, changed.compute, changed.step, hardware)).step_s
            found.append(Advice(setting, changed.step.tokens / step_s / pace, but))
    return tuple(sorted((each for each in found if each.speedup >= WORTHWHILE), key=lambda each: -each.speedup))


def _changes(request: PlacementRequest) -> Iterator[tuple[PlacementRequest, str, str]]:
    step = request.step
    for factor in (2, 4):
        sequences = step.sequences * factor
        larger = replace(request, step=replace(step, sequences=sequences))
        yield larger, f"train.sequences_per_step = {sequences}", f"{factor} times the tokens a step"
    if request.clip:
        yield replace(request, clip=False), "optimizer.max_grad_norm = 0", "no clipping: no gradient is held"
