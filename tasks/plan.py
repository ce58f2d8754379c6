"""Does a model fit, where does every byte live, how long is a step, what does a run cost: known before it starts.

    python -m tasks.plan RECIPE [--hardware FILE] [--json] [--price-per-hour X] [--token-budget N] [--set KEY=VALUE]

The step is the very graph that the run would submit, each operation priced by the rates of the machine. Without
--hardware this machine's memory decides and no time is predicted; what is chosen by time goes by the shipped machine
that is most like this one, as tasks.train does. Nothing is allocated, no weights and no data are read: the plan needs
shapes alone. Data that is not where the recipe says is noted, for tasks.train would refuse it.

Exit status: 0 it fits, 1 it does not fit, 2 the input is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.command_line import CommandParser, count, not_negative
from pipeline.errors import PipelineError
from pipeline.machine_memory import MachineMemory
from pipeline.placement import MemoryBudget, Placement, PlacementError, PlacementRequest, place
from pipeline.prediction.checkpoint_pace import CheckpointPace, checkpoint_pace
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Hardware, Nvme, find_hardware, load_hardware
from pipeline.prediction.simulate import Prediction, simulate
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe_placement import notes_of, place_recipe, planned_only, request_of, reserved_bytes, shape_of
from tasks.checkpoint_room import RunDisk, checkpoint_figures
from tasks.data.settings import DataError
from tasks.data.sources import find_files
from tasks.plan_advice import advice
from tasks.plan_report import Plan, TimeFigures
from tasks.plan_tables import tables
from tasks.preparation import data_settings, optimizer_shape
from tiers.errors import TierError

UNLIMITED = MemoryBudget(ram_bytes=2**60, gpu_bytes=2**60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        hardware = None if options.hardware is None else load_hardware(find_hardware(options.hardware))
        plan = make_plan(recipe, hardware, options.price_per_hour, options.token_budget)
    except (ValueError, PipelineError, TierError, OSError) as error:
        return parser.refuse(error)
    print(json.dumps(plan.as_json(), indent=2) if options.json else tables(plan))
    return parser.printed(0 if plan.fits else 1)


def make_plan(
    recipe: Recipe, hardware: Hardware | None, price_per_hour: float | None = None, token_budget: int | None = None
) -> Plan:
    """Place a recipe's model on a machine and predict its step.

    Args:
        recipe: What is to be trained.
        hardware: The machine; None means this one, without a prediction of time.
        price_per_hour: Of the machine, in any currency.
        token_budget: Tokens to train on; None means those of the recipe's steps.

    Raises:
        UnsupportedModelError: The model cannot be trained at all.
        PipelineError: This machine has no GPU and the recipe demands one.
    """
    machine = MachineMemory.of_this_machine(recipe) if hardware is None else MachineMemory.of_hardware(hardware, recipe)
    actors, _ = optimizer_shape(recipe, machine.cores)
    shape = shape_of(recipe)
    request = request_of(recipe, shape, cuda=machine.cuda, optimizer_actors=actors)
    reason = None
    try:
        placement = place_recipe(recipe, shape, machine, optimizer_actors=actors, hardware=hardware)
    except PlacementError as error:
        placement, reason = place(request, UNLIMITED), str(error)
    request = replace(request, step=placement.step)
    disk = RunDisk.of(recipe) if hardware is None else None
    return Plan(
        recipe=recipe.run.name,
        machine="this machine" if hardware is None else hardware.name,
        parameters=request.model.num_parameters,
        reason=reason,
        notes=(*(note for note in (planned_only(recipe), _missing_data(recipe)) if note), *notes_of(recipe)),
        placement=placement,
        checkpoints=checkpoint_figures(recipe, placement, disk),
        time=None if reason else _time(recipe, placement, request, hardware, price_per_hour, token_budget),
    )


def _time(
    recipe: Recipe,
    placement: Placement,
    request: PlacementRequest,
    hardware: Hardware | None,
    price_per_hour: float | None,
    token_budget: int | None,
) -> TimeFigures | None:
    if hardware is None:
        return None
    prediction = simulate(CostModel(placement, request.compute, request.step, hardware))
    drive = hardware.nvme
    return TimeFigures(
        steps=recipe.train.steps if token_budget is None else None,
        advice=advice(request, placement, prediction, hardware),
        prediction=prediction,
        tokens=request.step.tokens,
        token_budget=token_budget or request.step.tokens * recipe.train.steps,
        price_per_hour=price_per_hour,
        endurance_tb=drive.endurance_tb if drive is not None else 0.0,
        checkpoint=None if drive is None else _pace(recipe, placement, prediction, drive),
    )


def _pace(recipe: Recipe, placement: Placement, prediction: Prediction, drive: Nvme) -> CheckpointPace | None:
    if recipe.checkpoint.compression != "none":
        return None
    every = recipe.checkpoint.every_steps if recipe.checkpoint.every_steps < recipe.train.steps else 0
    # Taken off the budget already.
    room_bytes = placement.budget.ram_bytes - placement.arena_bytes + reserved_bytes(recipe)
    return checkpoint_pace(placement, prediction, drive, every_steps=every, room_bytes=room_bytes)


def _missing_data(recipe: Recipe) -> str | None:
    """Why no file of the recipe's data is found; None where all paths name some. Looks at names only."""
    try:
        for settings in data_settings(recipe):
            if settings is not None:
                find_files(settings)
    except DataError as error:
        return f"{error}; tasks.train refuses that"
    return None


def _parser() -> CommandParser:
    parser = CommandParser("tasks.plan", __doc__)
    parser.add_argument("recipe", type=Path, help="recipe, TOML")
    parser.add_argument("--hardware", metavar="FILE", help="hardware TOML, or the name of a shipped one")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and seconds")
    parser.add_argument("--price-per-hour", type=not_negative, metavar="X", help="price of the machine, for the cost")
    parser.add_argument("--token-budget", type=count, metavar="N", help="tokens to train on, e.g. 2e9")
    parser.add_overrides()
    return parser


if __name__ == "__main__":
    sys.exit(main())
