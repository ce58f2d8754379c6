"""`python -m tasks.bench roof|step|tier|optimizer [RECIPE.toml] [--set section.key=value] [--json]`.

step: real steps through all actors, and the roof of the same run beside it (--no-roof leaves it out). With --hardware
      the plan's prediction stands beside every figure.
roof: the same computation with all weights in device memory.
tier: layers streamed to and from the recipe's memory.nvme_dir, or --dir, beside raw O_DIRECT of the same drive.
optimizer: AdamW by 1 to n actors and threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cluster.join import connect
from pipeline.errors import PipelineError
from pipeline.families import model_layout
from pipeline.hardware import find_hardware, load_hardware
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe_placement import spec_of
from tasks.bench.comparison import compare
from tasks.bench.optimizer import OptimizerReport, measure_optimizer, mixtures
from tasks.bench.roof import RoofReport, measure_roof
from tasks.bench.show import show
from tasks.bench.step import StepReport, measure_steps
from tasks.bench.tier import TierReport, measure_tier
from tasks.preparation import Preparation, prepare
from tiers.errors import TierError

GIB = 2**30
DEFAULT_RECIPE = Path(__file__).parent.parent / "recipes" / "bench" / "qwen2.5-3b.toml"
"""A layer of it takes 0.9 GB: a few fit any machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 measured, 2 refused."""
    options = _parser().parse_args(arguments)
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        match options.what:
            case "tier":
                reports: dict[str, object] = {"tier": _tier(recipe, options, say)}
            case "optimizer":
                reports = {"optimizer": _optimizer(recipe, options, say)}
            case _:
                reports = _steps(prepare(recipe), options, say)
    except (ValueError, TierError, PipelineError, OSError) as error:
        print(f"bench: refused: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({name: _plain(report) for name, report in reports.items()}))
    else:
        show(reports)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["roof", "step", "tier", "optimizer"])
    parser.add_argument("recipe", type=Path, nargs="?", default=DEFAULT_RECIPE)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-roof", action="store_true")
    parser.add_argument("--hardware", metavar="FILE", help="step: hardware TOML, or the name of a shipped one")
    parser.add_argument("--dir", type=Path, help="tier: directory on the drive")
    parser.add_argument("--gib", type=float, default=4.0, help="tier, optimizer: bytes to work on")
    parser.add_argument("--rounds", type=int, default=5, help="tier: rounds measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="optimizer: for each mixture")
    parser.add_argument("--json", action="store_true")
    return parser


def _steps(preparation: Preparation, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, object]:
    hardware = None if options.hardware is None else load_hardware(find_hardware(options.hardware))
    reports: dict[str, object] = {}
    if options.what == "roof" or not options.no_roof:
        reports["roof"] = _roof_in_child(preparation, options.steps)
    if options.what == "step":
        with connect(num_gpus=1 if preparation.cuda else 0):
            steps = measure_steps(preparation, options.steps, say)
        reports["step"] = steps
        reports["plan"] = compare(preparation, steps, hardware)
    return reports


def _roof_in_child(preparation: Preparation, steps: int) -> RoofReport:
    """In a process of its own: the device memory it takes must be free again for the steps."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_roof, (preparation, steps))


def _tier(recipe: Recipe, options: argparse.Namespace, say: Callable[[str], None]) -> TierReport:
    directory = options.dir or recipe.memory.nvme_dir
    if directory is None:
        raise ValueError("bench tier needs a directory on the drive: give --dir, or memory.nvme_dir in the recipe")
    return measure_tier(
        model_layout(spec_of(recipe)),
        directory,
        num_bytes=int(options.gib * GIB),
        threads=recipe.memory.prefetch_threads,
        rounds=options.rounds,
        say=say,
    )


def _optimizer(recipe: Recipe, options: argparse.Namespace, say: Callable[[str], None]) -> OptimizerReport:
    return measure_optimizer(
        model_layout(spec_of(recipe)),
        mixtures(os.cpu_count() or 1),
        num_bytes=int(options.gib * GIB),
        seconds=options.seconds,
        say=say,
    )


def _plain(report: object) -> object:
    """Values that JSON has."""
    if isinstance(report, tuple):
        return [_plain(each) for each in report]
    assert isinstance(report, StepReport | RoofReport | TierReport | OptimizerReport) or dataclasses.is_dataclass(
        report
    )
    return dataclasses.asdict(report)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
