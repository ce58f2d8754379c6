"""Train a model: `python -m tasks.train RECIPE.toml [--set section.key=value ...]`.

Inside a Ray job, or with RAY_ADDRESS, it joins that cluster; otherwise it starts an embedded Ray for itself.

Exit status: 0 trained; 1 the run failed; 2 the recipe, model, data or machine was refused and nothing was changed;
3 stopped by a signal after a checkpoint, to be gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from cluster.errors import ClusterError, ClusterRefusedError
from cluster.join import connect, require_resources
from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.errors import PipelineError
from pipeline.families.flops import model_flops_per_token
from pipeline.messages import Batch
from pipeline.recipe import Recipe, load_recipe, recipe_toml
from tasks.checkpointing import Checkpoints, Progress
from tasks.data.loader import BatchLoader, eval_batches
from tasks.failure import explain
from tasks.filling import fill
from tasks.preparation import Data, Preparation, open_data, prepare
from tasks.resume import ResumePoint, find_resume_point
from tasks.run_directory import RunDirectory
from tasks.run_log import RunFacts, RunLog
from tasks.stop_signals import StopSignals
from tasks.training import Ending, Training
from tiers.errors import TierError
from tiers.layout import ArenaMap

TRAINED, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

RESOURCE_TIMEOUT_S = 60.0
"""How long another job may hold the GPU before this one gives up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.train", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe, TOML")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--address", help="of a running Ray head; default: RAY_ADDRESS, else an embedded Ray")
    parser.add_argument("--dry-run", action="store_true", help="vet everything, say where it would resume, and stop")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with contextlib.ExitStack() as held:
        try:
            launch = _vet(options, held)
        except (ValueError, TierError, PipelineError, ClusterRefusedError, OSError) as error:
            print(f"train: refused: {error}", file=sys.stderr, flush=True)
            return REFUSED
        if options.dry_run:
            return TRAINED
        launch.directory.keep(recipe_toml(launch.preparation.recipe))
        return _train(launch, options.address)


@dataclass(frozen=True)
class _Launch:
    """A recipe that passed every check."""

    preparation: Preparation
    data: Data
    resume: ResumePoint | None
    directory: RunDirectory


def _vet(options: argparse.Namespace, held: contextlib.ExitStack) -> _Launch:
    """Refuse what cannot be trained; nothing but the data cache is written."""
    say = partial(print, flush=True)
    recipe = load_recipe(options.recipe, options.overrides)
    preparation = prepare(recipe)
    resume = find_resume_point(recipe, say)
    directory = held.enter_context(RunDirectory(recipe.run.dir))
    data = open_data(recipe, preparation.spec, say)
    launch = _Launch(preparation, data, resume, directory)
    _announce(launch)
    return launch


def _announce(launch: _Launch) -> None:
    """Show what is about to happen."""
    preparation, data, resume = launch.preparation, launch.data, launch.resume
    recipe, model = preparation.recipe, preparation.placement.tier.model
    print(recipe_toml(recipe))
    print(f"model: {preparation.spec.model_type}, {model.num_parameters:,} parameters, {len(model.layers) - 2} layers")
    print(f"data: {data.training.report}")
    if data.held_out is not None:
        print(f"held out: {data.held_out.report}")
    if data.training.num_sequences < recipe.train.sequences_per_step:
        print(
            f"note: an epoch has {data.training.num_sequences} sequences and a step takes "
            f"{recipe.train.sequences_per_step}: each step sees the data more than once"
        )
    start = f"from {resume.directory} (step {resume.progress.step})" if resume else "from step 0"
    print(f"run: {recipe.run.dir}, {start}", flush=True)


def _train(launch: _Launch, address: str | None) -> int:
    """Run a vetted recipe to its end, and say how it ended."""
    say = partial(print, flush=True)
    try:
        with connect(address, num_gpus=1 if launch.preparation.cuda else 0) as connection:
            if connection.dashboard_url:
                say(f"dashboard: {connection.dashboard_url}")
            if launch.preparation.cuda:
                require_resources({"GPU": 1}, RESOURCE_TIMEOUT_S)
            # After Ray's own handlers, which would end the process at once.
            with StopSignals() as signals:
                ending = _run(launch, signals)
    except (RayError, PipelineError, TierError, ClusterError, OSError) as error:
        print(f"train: failed: {explain(error)}", file=sys.stderr, flush=True)
        return FAILED
    return TRAINED if ending is Ending.TRAINED else STOPPED


def _run(launch: _Launch, signals: StopSignals) -> Ending:
    preparation, data, resume = launch.preparation, launch.data, launch.resume
    recipe, placement = preparation.recipe, preparation.placement
    model, progress = placement.tier.model, resume.progress if resume else Progress()
    namespace = f"megatrain-{recipe.run.name}-{ray.get_runtime_context().get_job_id()}"
    facts = RunFacts(
        flops_per_token=model_flops_per_token(preparation.spec, recipe.train.sequence_length),
        arena_bytes=ArenaMap.of(placement.tier).total_bytes,
    )
    say = partial(print, flush=True)
    with (
        Crew.start(
            preparation.spec,
            placement.tier,
            preparation.compute,
            preparation.optimizer,
            preparation.crew,
            namespace,
            say,
        ) as crew,
        BatchLoader(
            data.training,
            sequences_per_step=recipe.train.sequences_per_step,
            micro_batch=recipe.train.micro_batch,
            position=progress.position,
        ) as loader,
        RunLog(recipe, crew, facts, progress.step) as log,
    ):
        fill(crew, model, recipe, resume.directory if resume else None, say)
        training = Training(
            recipe=recipe,
            coordinator=Coordinator(crew, placement.schedule, applied_steps=progress.applied_steps),
            loader=loader,
            held_out=_evaluation(recipe, data),
            checkpoints=Checkpoints(recipe, model, progress.step if resume else -1),
            log=log,
            progress=progress,
            stop_requested=signals.requested,
        )
        ending = training.run()
        step = training.progress.step
        say(
            f"trained {step} steps; export with: python -m tasks.export_hf {recipe.run.dir} OUT"
            if ending is Ending.TRAINED
            else f"stopped after step {step}; the same command goes on from its checkpoint"
        )
        return ending


def _evaluation(recipe: Recipe, data: Data) -> Callable[[], Iterator[Batch]] | None:
    """Batches of an evaluation: the same every time, as many as the recipe asks for."""
    if data.held_out is None:
        return None
    micro_batches = recipe.train.micro_batches
    batches = partial(eval_batches, data.held_out, recipe.train.micro_batch, micro_batches)
    if recipe.eval.sequences is None:
        return batches
    passes = -(-recipe.eval.sequences // recipe.train.sequences_per_step)
    return lambda: itertools.islice(batches(), passes)


if __name__ == "__main__":
    sys.exit(main())
