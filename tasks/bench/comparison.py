"""A plan's prediction beside what the same run measured: the table that says how far plans can be trusted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.memory.device_footprint import NOT_IN_TORCH_PEAK
from pipeline.memory.footprint import Place, total
from pipeline.memory.host_footprint import (
    CHECKPOINT_STAGING,
    NOT_IN_HELD_BYTES,
    RUNNING_BEFORE_ALLOCATION,
    TIMED_KERNELS,
)
from pipeline.placement import Placement
from pipeline.prediction.hardware import Hardware
from pipeline.recipe_placement import predict
from tasks.bench.step import StepReport
from tasks.preparation import Preparation

BYTES_LIMITS = (0.0, 0.05)
"""Of a prediction's excess: never below, since what was promised to fit would not."""
STEP_LIMITS = (-0.15, 0.15)

STEP = "step"
HOST_HELD = "host: arena, driver and actors"
HOST_TAKEN = "host: all that became unavailable"
DEVICE_PEAK = "device: torch's peak"
DEVICE_TAKEN = "device: in use by the driver"
"""What the figures are called."""


@dataclass(frozen=True)
class Figure:
    """One quantity."""

    name: str
    unit: str
    """`s` or `bytes`."""
    predicted: float
    measured: float

    @property
    def excess(self) -> float:
        """How far the prediction lies above the measurement, as a share of it; negative where below."""
        return self.predicted / self.measured - 1

    @property
    def violation(self) -> str | None:
        """How a plan that can be trusted would not miss it; None where it is within the limits, or there are none."""
        if self.unit == "bytes":
            limits = BYTES_LIMITS
        elif self.name == STEP:
            limits = STEP_LIMITS
        else:
            return None
        low, high = limits
        if low <= self.excess <= high:
            return None
        return f"the plan lies {self.excess:+.1%} off the measurement, {low:+.0%} to {high:+.0%} are allowed"


def compare(preparation: Preparation, report: StepReport, hardware: Hardware | None) -> tuple[Figure, ...]:
    """Predict what was measured; times only with a description of the machine."""
    placement = preparation.placement
    held_bytes = _host(placement, (*NOT_IN_HELD_BYTES, CHECKPOINT_STAGING))
    taken_bytes = _host(placement, (*RUNNING_BEFORE_ALLOCATION, TIMED_KERNELS, CHECKPOINT_STAGING))
    figures = [
        Figure(HOST_HELD, "bytes", held_bytes, report.host_bytes),
        Figure(HOST_TAKEN, "bytes", taken_bytes, report.host_taken_bytes),
    ]
    if preparation.cuda:
        device = [term for term in placement.terms if term.place is Place.DEVICE]
        peak = total(term for term in device if term.name not in NOT_IN_TORCH_PEAK)
        figures.append(Figure(DEVICE_PEAK, "bytes", peak, report.gpu_peak_bytes))
        figures.append(Figure(DEVICE_TAKEN, "bytes", total(device), report.device_taken_bytes))
    if hardware is not None:
        prediction = predict(preparation.recipe, placement, hardware)
        figures.append(Figure(STEP, "s", prediction.step_s, report.step_s))
        for load in prediction.lanes:
            measured = report.lanes.get(str(load.lane), 0.0) * report.step_s
            if load.busy_s and measured:
                figures.append(Figure(f"busy: {load.lane}", "s", load.busy_s, measured))
    return tuple(figure for figure in figures if figure.measured)


def _host(placement: Placement, left_out: Collection[str]) -> int:
    return total(term for term in placement.terms if term.place is Place.RAM and term.name not in left_out)
