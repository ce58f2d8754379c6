"""Measures this machine with the real parts.

    python -m tasks.bench step|roof [RECIPE ...] [--sweep section.key=v1,v2] [--out FILE] [--hardware FILE]
    python -m tasks.bench checkpoint|control|tier|optimizer [RECIPE]

step:       real steps through all actors, and the roof of the same run beside them (--no-roof leaves it out). Of
            several recipes or swept values each is a row; rows are written to --out as they are known, and shown as a
            table. With --hardware the plan's step time stands beside the measured one, not its bytes alone.
roof:       the same computation with all weights in device memory.
checkpoint: steps with and without a checkpoint beside them, not compressed and compressed.
control:    what it costs that a step is a graph of Ray calls (small models on the CPU).
tier:       layers streamed to and from the recipe's memory.nvme_dir, or --dir, beside raw O_DIRECT of the same drive.
optimizer:  AdamW by 1 to n actors and threads.

Every command takes --set section.key=value and --json. Exit status: 0 measured, 1 rows or Ray failed, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ray.exceptions import RayError

from cluster.command_line import CommandParser, count, positive
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.join import connect
from cluster.output_file import OutputFile
from pipeline.errors import PipelineError
from pipeline.families import model_layout
from pipeline.prediction.hardware import find_hardware, load_hardware
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe_placement import spec_of
from tasks.arguments import gibibytes
from tasks.bench.checkpoint import measure_checkpoints
from tasks.bench.control import measure_control
from tasks.bench.optimizer import OptimizerReport, measure_optimizer, mixtures
from tasks.bench.rows import plain, rows_of, run_rows
from tasks.bench.show import show
from tasks.bench.step_rows import StepRows
from tasks.bench.table import table
from tasks.bench.tier import TierReport, measure_tier
from tasks.failure import explain
from tasks.preparation import prepare
from tiers.errors import TierError
from tiers.processors import usable_cores
from tiers.store_metadata import Compression

GIB = 2**30
RECIPES = Path(__file__).parent.parent / "recipes"
DEFAULT_RECIPES = {
    "checkpoint": RECIPES / "bench" / "checkpoint-cpu.toml",
    "control": RECIPES / "demo.toml",
}
"""Of others qwen2.5-3b: a layer of it takes 0.9 GB, a few fit any machine."""

CHECKPOINTED = ("checkpoint.every_steps=1",)
"""So that the plan has staging memory; the bench writes when it will."""

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    say: Say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    default = DEFAULT_RECIPES.get(options.what, RECIPES / "bench" / "qwen2.5-3b.toml")
    recipes: list[Path] = options.recipes or [default]
    try:
        if options.what in ("step", "roof"):
            return parser.printed(_rows(recipes, options, say))
        if len(recipes) > 1 or options.sweep or options.out:
            raise ValueError(f"bench {options.what} takes one recipe; several rows, --sweep and --out are for steps")
        overrides = (*(CHECKPOINTED if options.what == "checkpoint" else ()), *options.overrides)
        recipe = load_recipe(recipes[0], overrides)
        match options.what:
            case "tier":
                reports: Mapping[str, object] = {"tier": _tier(recipe, options, say)}
            case "optimizer":
                reports = {"optimizer": _optimizer(recipe, options, say)}
            case "checkpoint":
                reports = _checkpoint(recipe, options, say)
            case _:
                reports = _control(recipe, options, say)
    except ClusterRefusedError as error:
        return parser.refuse(error)
    except (RayError, ClusterError) as error:
        return parser.fail(explain(error))
    except (ValueError, TierError, PipelineError, OSError) as error:
        return parser.refuse(error)
    _print(reports, options.json)
    return parser.printed(0)


def _parser() -> CommandParser:
    parser = CommandParser("tasks.bench", __doc__)
    parser.add_argument("what", choices=["step", "roof", "checkpoint", "control", "tier", "optimizer"])
    parser.add_argument("recipes", type=Path, nargs="*", metavar="RECIPE")
    parser.add_overrides()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=count, default=5, help="measured; of each segment of checkpoint and control")
    parser.add_argument("--no-roof", action="store_true", help="step: leave the roof out")
    parser.add_argument("--hardware", metavar="FILE", help="step: hardware TOML, or the name of a shipped one")
    parser.add_argument("--sweep", action="append", default=[], metavar="section.key=v1,v2", help="step: a row a value")
    parser.add_argument("--out", type=Path, metavar="FILE", help="step: a line of JSON a row, as soon as it is known")
    parser.add_argument("--time-limit", type=positive, metavar="S", help="step: begin no row that would end later")
    parser.add_argument("--dir", type=Path, help="tier, checkpoint: directory on the drive")
    parser.add_argument("--rounds", type=count, default=5, help="tier, checkpoint, control: rounds measured")
    parser.add_argument("--compression", choices=[*Compression], help="checkpoint: this one alone")
    parser.add_argument("--gib", type=gibibytes, default=4.0, help="tier, optimizer: bytes to work on")
    parser.add_argument("--seconds", type=positive, default=3.0, help="optimizer: for each mixture")
    return parser


def _rows(recipes: Sequence[Path], options: argparse.Namespace, say: Say) -> int:
    """One row as a report of its own, several as a table."""
    until_s = math.inf if options.time_limit is None else time.monotonic() + options.time_limit
    measuring = StepRows(
        steps=options.steps,
        with_roof=options.what == "roof" or not options.no_roof,
        with_steps=options.what == "step",
        hardware=None if options.hardware is None else load_hardware(find_hardware(options.hardware)),
        say=say,
        until_s=until_s,
    )
    rows = rows_of(recipes, options.overrides, options.sweep)
    if options.out is not None:
        OutputFile.at(options.out)  # before the first row is measured
    if len(rows) == 1 and options.out is None:
        _print(measuring.measure(rows[0]), options.json)
        return 0
    results = run_rows(rows, measuring.measure, out=options.out, say=say, until_s=until_s)
    print("\n".join(result.as_json() for result in results) if options.json else f"\n{table(results)}")
    return 0 if len(results) == len(rows) and not any(result.error for result in results) else 1


def _checkpoint(recipe: Recipe, options: argparse.Namespace, say: Say) -> dict[str, object]:
    preparation = prepare(recipe)
    reports: dict[str, object] = {}
    with connect(num_gpus=1 if preparation.cuda else 0):
        for compression in [Compression(options.compression)] if options.compression else Compression:
            reports[f"checkpoint {compression}"] = measure_checkpoints(
                preparation,
                compression,
                directory=options.dir,
                steps=options.steps,
                rounds=options.rounds,
                say=say,
            )
    return reports


def _control(recipe: Recipe, options: argparse.Namespace, say: Say) -> dict[str, object]:
    preparation = prepare(recipe)
    with connect(num_gpus=0):
        return {"control": measure_control(preparation, steps=options.steps, rounds=options.rounds, say=say)}


def _tier(recipe: Recipe, options: argparse.Namespace, say: Say) -> TierReport:
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


def _optimizer(recipe: Recipe, options: argparse.Namespace, say: Say) -> OptimizerReport:
    return measure_optimizer(
        model_layout(spec_of(recipe)),
        mixtures(usable_cores()),
        num_bytes=int(options.gib * GIB),
        seconds=options.seconds,
        say=say,
    )


def _print(reports: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: plain(report) for name, report in reports.items()}))
    else:
        show(reports)


if __name__ == "__main__":
    sys.exit(main())
