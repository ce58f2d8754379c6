"""Trains a model as a recipe says.

    python -m tasks.train RECIPE.toml [--hardware FILE] [--set section.key=value ...]

What the plan chooses by predicted time goes by the rates in --hardware (a file of `tasks.probe`, or a shipped one's
name), else by those of the shipped machine that is most like this one.

Inside a Ray job, or with RAY_ADDRESS, it joins that cluster; otherwise it starts an embedded Ray for itself.

A lost actor is replaced and the run goes on from its newest checkpoint, `run.max_recoveries` times. After anything else
(the driver killed, Ray or the machine gone) the same command goes on from there, where run.resume is "auto" as it is by
default.

Exit status: 0 trained; 1 the run failed; 2 the recipe, model, data or machine was refused and nothing was changed;
3 stopped by SIGTERM (`ray job stop`), SIGINT or SIGHUP (a closed terminal) after a checkpoint of the last finished
step, to be gone on with; 130 ended at once by a second such signal; 130, 143 or 129 ended by SIGINT, SIGTERM or SIGHUP
before the first step, with nothing changed. A signal that is ignored from the start, as by `nohup`, stays so. Ray
kills a job that has not saved when the grace period of the head is over: 600 s with `cluster.head up`, which a step and
its checkpoint have to fit in; 3 s with plain `ray start` unless RAY_JOB_STOP_WAIT_TIME_S says more. The checkpoint
before is whole then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ray.exceptions import RayError

from cluster.command_line import CommandParser
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.job_stop import short_stop
from cluster.join import connect, require_resources
from pipeline.errors import PipelineError
from pipeline.memory.footprint import Place
from pipeline.placement import summary
from pipeline.prediction.hardware import Hardware, find_hardware, load_hardware
from pipeline.recipe import load_recipe, recipe_toml
from pipeline.recipe_placement import notes_of, predict
from tasks.assigned_gpu import require_planned_gpu
from tasks.attempt import Launch, ending_line
from tasks.checkpoint_room import require_checkpoint_room
from tasks.failure import explain
from tasks.interruption import whoever_handles_signals
from tasks.preparation import Preparation, open_data, prepare
from tasks.recovery import run_with_recoveries, way_on
from tasks.resume import check_data, find_resume_point, prepare_resumed
from tasks.run_directory import RunDirectory
from tasks.stop_signals import StopSignals
from tasks.training import Ending
from tiers.errors import TierError
from tiers.host_memory import SHMEM_HUGE_PAGES, shared_memory_has_huge_pages
from tiers.quantities import shown_duration

TRAINED, STOPPED = 0, 3

RESOURCE_TIMEOUT_S = 60.0
"""How long another job may hold the GPU before this one gives up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = CommandParser("tasks.train", __doc__)
    parser.add_argument("recipe", type=Path, help="recipe, TOML")
    parser.add_overrides()
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of a running Ray head; default: RAY_ADDRESS, else an embedded Ray"
    )
    parser.add_argument("--hardware", metavar="FILE", help="hardware TOML, or the name of a shipped one")
    parser.add_argument("--dry-run", action="store_true", help="vet everything, say where it would resume, and stop")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with contextlib.ExitStack() as held:
        try:
            launch = _vet(options, held)
        except (ValueError, TierError, PipelineError, OSError) as error:
            return parser.refuse(error)
        if options.dry_run:
            return TRAINED
        if launch.is_over:
            print(ending_line(launch.preparation.recipe, launch.start))
            return TRAINED
        return _train(launch, options.address, parser)


def _vet(options: argparse.Namespace, held: contextlib.ExitStack) -> Launch:
    """Refuse what cannot be trained; nothing but the data cache is written."""
    say = partial(print, flush=True)
    recipe = load_recipe(options.recipe, options.overrides)
    hardware = None if options.hardware is None else load_hardware(find_hardware(options.hardware))
    resume = find_resume_point(recipe, say)
    preparation = prepare(recipe, hardware) if resume is None else prepare_resumed(recipe, resume, say, hardware)
    recipe, placement = preparation.recipe, preparation.placement
    start = resume.progress.step if resume is not None else 0
    require_checkpoint_room(recipe, placement, start)
    directory = held.enter_context(RunDirectory(recipe.run.dir))
    data = open_data(recipe, preparation.spec, say)
    # Again, since the data's tokens have been written there.
    require_checkpoint_room(recipe, placement, start)
    if resume is not None:
        check_data(recipe, resume, data.training, say)
    launch = Launch(preparation, data, resume, directory)
    _announce(launch, hardware)
    return launch


def _announce(launch: Launch, hardware: Hardware | None) -> None:
    """Show what is about to happen."""
    preparation, data, resume = launch.preparation, launch.data, launch.resume
    recipe, model = preparation.recipe, preparation.placement.tier.model
    print(recipe_toml(recipe))
    print(f"model: {preparation.spec.model_type}, {model.num_parameters:,} parameters, {len(model.layers) - 2} layers")
    print(f"device: {_device(preparation)}")
    print(f"memory: {summary(preparation.placement)}")
    if hardware is not None:
        step = predict(recipe, preparation.placement, hardware)
        print(f"step: {shown_duration(step.step_s)} by the rates of {hardware.name}; bottleneck: {step.bottleneck}")
    if preparation.placement.used(Place.NVME) and not shared_memory_has_huge_pages():
        print(f"note: NVMe moves faster with huge pages: as root, `echo advise > {SHMEM_HUGE_PAGES}`")
    for note in notes_of(recipe):
        print(f"note: {note}")
    print(f"data: {data.training.report}")
    if data.held_out is not None:
        print(f"held out: {data.held_out.report}")
        if not recipe.eval.every_steps:
            print("note: nothing is measured on the held-out data: set eval.every_steps")
    if data.training.num_sequences < recipe.train.sequences_per_step:
        print(
            f"note: an epoch has {data.training.num_sequences} sequences and a step takes "
            f"{recipe.train.sequences_per_step}: each step sees the data more than once"
        )
    start = f"from {resume.directory} (step {resume.progress.step})" if resume else "from step 0"
    print(f"run: {recipe.run.dir}, {start}", flush=True)


def _device(preparation: Preparation) -> str:
    """Where the run computes, and why where that may surprise."""
    if preparation.cuda:
        return "cuda"
    if preparation.recipe.train.device == "cpu":
        return "cpu"
    version = importlib.metadata.version("torch")
    return f'cpu: torch {version} sees no GPU (train.device = "cuda" refuses instead)'


def _train(launch: Launch, address: str | None, parser: CommandParser) -> int:
    """Run a vetted recipe to its end, and say how it ended."""
    say, preparation, signals = partial(print, flush=True), launch.preparation, StopSignals()
    try:
        with contextlib.ExitStack() as held:
            with whoever_handles_signals():
                connection = held.enter_context(connect(address, num_gpus=1 if preparation.cuda else 0))
            if connection.dashboard_url:
                say(f"dashboard: {connection.dashboard_url}")
            if not connection.embedded and (note := short_stop()):
                say(f"note: {note}")
            if preparation.cuda:
                require_resources({"GPU": 1}, RESOURCE_TIMEOUT_S)
                if not connection.embedded and (note := require_planned_gpu(preparation.placement.used(Place.DEVICE))):
                    say(f"note: {note}")
            held.enter_context(signals)
            ending = run_with_recoveries(launch, signals, say)
    except ClusterRefusedError as error:
        return parser.refuse(error)
    except (RayError, PipelineError, TierError, ClusterError, OSError) as error:
        return parser.fail(explain(error, _way_on(launch)))
    except KeyboardInterrupt:  # before the first step
        return signals.status()
    return TRAINED if ending is Ending.TRAINED else STOPPED


def _way_on(launch: Launch) -> str:
    return way_on(launch.preparation.recipe.run, launch.resume, has_begun=launch.directory.has_begun)


if __name__ == "__main__":
    sys.exit(main())
