"""A row of steps: the recipe's real steps, the roof of the same computation beside them, and the plan of both."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from cluster.join import connect
from pipeline.prediction.hardware import Hardware
from pipeline.recipe import load_recipe
from tasks.bench.comparison import compare
from tasks.bench.roof import RoofReport, measure_roof
from tasks.bench.rows import Row
from tasks.bench.step import measure_steps
from tasks.preparation import Preparation, prepare


@dataclass
class StepRows:
    """Measures rows; a roof that a row before had is not measured again."""

    steps: int
    with_roof: bool
    with_steps: bool
    hardware: Hardware | None
    """By whose rates the plan chooses, with its prediction of time beside; None for bytes alone."""
    say: Callable[[str], None]
    until_s: float = math.inf
    """`time.monotonic()` after which a row ends, once it has a step."""
    _roofs: dict[object, RoofReport] = field(default_factory=dict)

    def measure(self, row: Row) -> dict[str, object]:
        """The reports of a row, by kind.

        Raises:
            ValueError, TierError, PipelineError, OSError: The recipe is refused.
            RayError: An actor failed.
        """
        preparation = prepare(load_recipe(row.recipe, row.overrides), self.hardware)
        reports: dict[str, object] = {}
        if self.with_roof:
            reports["roof"] = self._roof(preparation)
        if self.with_steps:
            # A Ray of its own: an actor that died, or a raylet, would be the next row's too.
            with connect(num_gpus=1 if preparation.cuda else 0):
                steps = measure_steps(preparation, self.steps, self.say, self.until_s)
            reports["step"] = steps
            reports["plan"] = compare(preparation, steps, self.hardware)
        return reports

    def _roof(self, preparation: Preparation) -> RoofReport:
        recipe = preparation.recipe
        kept_layers = preparation.placement.schedule.kept_layers
        key = preparation.spec.config_json, recipe.train, recipe.precision, kept_layers
        if key not in self._roofs:
            self._roofs[key] = _in_child(preparation, self.steps)
        return self._roofs[key]


def _in_child(preparation: Preparation, steps: int) -> RoofReport:
    """In a process of its own: the device memory it takes must be free again for the steps."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_roof, preparation, steps).result()
