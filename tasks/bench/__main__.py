"""`python -m tasks.bench roof|step RECIPE.toml [--set section.key=value] [--steps N] [--json]`.

step: real steps through all actors, and the roof of the same run beside it (--no-roof leaves it out).
roof: the same computation with all weights in device memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.join import connect
from pipeline.errors import PipelineError
from pipeline.recipe import load_recipe
from tasks.bench.roof import RoofReport, measure_roof
from tasks.bench.step import StepReport, measure_steps
from tasks.preparation import Preparation, prepare
from tiers.errors import TierError

GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 measured, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m tasks.bench", description=__doc__)
    parser.add_argument("what", choices=["roof", "step"])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-roof", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    try:
        preparation = prepare(load_recipe(options.recipe, options.overrides))
    except (ValueError, TierError, PipelineError, OSError) as error:
        print(f"bench: refused: {error}", file=sys.stderr)
        return 2
    roof = None
    if options.what == "roof" or not options.no_roof:
        roof = _roof_in_child(preparation, options.steps)
    steps = None
    if options.what == "step":
        with connect(num_gpus=1 if preparation.cuda else 0):
            steps = measure_steps(preparation, options.steps, say)
    if options.json:
        print(json.dumps({name: dataclasses.asdict(r) for name, r in (("roof", roof), ("step", steps)) if r}))
    else:
        _show(roof, steps)
    return 0


def _roof_in_child(preparation: Preparation, steps: int) -> RoofReport:
    """In a process of its own: the device memory it takes must be free again for the steps."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_roof, (preparation, steps))


def _show(roof: RoofReport | None, steps: StepReport | None) -> None:
    if roof is not None:
        print(f"roof          {roof.step_s:8.3f} s a step  {roof.model_tflops:7.1f} model TFLOP/s")
    if steps is None:
        return
    share = f"  {steps.model_tflops / roof.model_tflops:.1%} of the roof" if roof else ""
    print(f"step          {steps.step_s:8.3f} s a step  {steps.model_tflops:7.1f} model TFLOP/s{share}")
    print(f"tokens        {steps.tokens:,} a step, {steps.tokens_per_s:,.0f} a second")
    print("busy          " + ", ".join(f"{lane} {share:.0%}" for lane, share in sorted(steps.lanes.items())))
    print("stalls        " + ", ".join(f"{k} {v:.3f} s" for k, v in dataclasses.asdict(steps.stalls).items()))
    print(f"updates       {steps.update_gparams_per_s:.2f} Gparam/s while at work")
    host = f"{steps.host_bytes / GIB:.1f} GiB ({steps.host_bytes / steps.parameters:.2f} bytes a parameter)"
    print(f"memory        device peak {steps.gpu_peak_bytes / GIB:.1f} GiB, host {host}")
    print(f"first step    {steps.first_step_s:.1f} s after the start")


if __name__ == "__main__":
    sys.exit(main())
