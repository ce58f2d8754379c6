"""One attempt at a run: start the actors, fill them, train; where an actor is lost, say which, where and with what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import ray

from pipeline.actor_handles import END_TIMEOUT_S
from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.errors import ActorLostError, OperationError, RayLostError
from pipeline.families.flops import model_flops_per_token
from pipeline.metrics import is_evaluated
from pipeline.recipe import Recipe
from tasks.checkpointing import Checkpoints, Progress
from tasks.data.loader import BatchLoader
from tasks.evaluation import evaluation
from tasks.failure import actor_states, failure_of, is_death, loss_at_start, loss_of, ray_loss
from tasks.filling import fill
from tasks.preparation import Data, Preparation
from tasks.resume import ResumePoint, same_command
from tasks.run_directory import RunDirectory
from tasks.run_log import RunFacts, RunLog
from tasks.stop_signals import StopSignals
from tasks.training import Ending, Training
from tasks.vigil import Vigil
from tiers.arena_map import ArenaMap


@dataclass(frozen=True)
class Launch:
    """A recipe that passed every check."""

    preparation: Preparation
    data: Data
    resume: ResumePoint | None
    directory: RunDirectory

    @property
    def start(self) -> int:
        """Step that it goes on from."""
        return self.resume.progress.step if self.resume is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether all was done before: the last step's checkpoint is the run's own, and nothing is left to measure."""
        recipe = self.preparation.recipe
        own = self.resume is not None and recipe.run.resume == "auto"
        owes = recipe.eval.every_steps and not is_evaluated(recipe.run.dir, self.start)
        return own and self.start >= recipe.train.steps and not owes


def ending_line(recipe: Recipe, step: int) -> str:
    """What to say of a run that has come to its end."""
    return f"trained {step} steps; export with: python -m tasks.export_hf {recipe.run.dir} OUT"


def attempt(
    launch: Launch,
    resume: ResumePoint | None,
    number: int,
    begin: Callable[[], None],
    signals: StopSignals,
    say: Callable[[str], None],
) -> Ending:
    """Train from `resume` to the end with actors of this attempt's own; they are gone when it returns or raises.

    Args:
        launch: The run.
        resume: Checkpoint to restore; None for the first values.
        number: Of the attempt, from 0.
        begin: Called when the first step is next.
        signals: That may stop it.
        say: Shows a line.

    Raises:
        ActorLostError: An actor died: what was in memory is lost, and the partial checkpoint is removed.
        RayLostError: Ray's raylet died, and with it the means to start another attempt.
        OperationError: An actor raised an error at an operation.
        KeyboardInterrupt: A signal came before the first step.
        RayError, PipelineError, TierError, OSError: The run failed; another attempt would fail alike.
    """
    signals.end_at_once()
    preparation, data = launch.preparation, launch.data
    recipe, placement = preparation.recipe, preparation.placement
    model, progress = placement.tier.model, resume.progress if resume else Progress()
    checkpoints = Checkpoints(recipe, model, data.training, preparation.device, progress.step if resume else -1)
    namespace = f"megatrain-{recipe.run.name}-{ray.get_runtime_context().get_job_id()}-{number}"
    settings = preparation.compute, preparation.optimizer, preparation.crew
    with ExitStack() as held:
        # Last of all, when no actor writes to it any more.
        held.callback(checkpoints.abandon)
        try:
            crew = held.enter_context(
                Crew.start(
                    preparation.spec,
                    placement.tier,
                    *settings,
                    namespace,
                    say,
                    memory_wait_s=END_TIMEOUT_S if number else 0.0,
                )
            )
        except (ray.exceptions.RayActorError, ActorLostError) as error:
            if is_death(error):
                raise ActorLostError(loss_at_start(error)) from error
            raise
        coordinator = Coordinator(crew, placement.schedule, applied_steps=progress.applied_steps)
        try:
            fill(crew, model, recipe, resume.directory if resume else None, say)
            loader = BatchLoader(
                data.training,
                sequences_per_step=recipe.train.sequences_per_step,
                micro_batch=recipe.train.sequences_at_once,
                position=progress.position,
            )
            facts = RunFacts(
                flops_per_token=model_flops_per_token(preparation.spec, recipe.train.sequence_length),
                arena_bytes=ArenaMap.of(placement.tier).total_bytes,
                head=placement.schedule.head,
            )

            def open_log() -> RunLog:
                signals.finish_and_save()
                begin()
                return held.enter_context(RunLog(recipe, crew, facts, progress.step))

            training = Training(
                recipe=recipe,
                coordinator=coordinator,
                loader=held.enter_context(loader),
                held_out=evaluation(recipe, data.held_out, placement.schedule.waves),
                checkpoints=checkpoints,
                begin=open_log,
                is_evaluated=is_evaluated(recipe.run.dir, progress.step),
                progress=progress,
                stop_requested=signals.requested,
                require_alive=partial(_require_alive, crew),
                vigil=held.enter_context(Vigil(partial(actor_states, crew, coordinator))),
            )
            ending = training.run()
            signals.ignore()
        except (ray.exceptions.RayError, ActorLostError) as error:
            if not is_death(error):
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise OperationError(failure_of(coordinator, error)) from error
                raise
            if crew.processes.raylet_ended():
                raise RayLostError(ray_loss()) from error
            raise ActorLostError(loss_of(crew, coordinator, error)) from error
    step = training.progress.step
    if ending is Ending.TRAINED:
        say(ending_line(recipe, step))
    else:
        say(f"stopped after step {step}; {same_command(recipe.run)} goes on from its checkpoint")
    return ending


def _require_alive(crew: Crew) -> None:
    if crew.processes.raylet_ended():
        raise RayLostError(ray_loss())
    if names := crew.processes.dead():
        raise ActorLostError(f"gone: {', '.join(names)}")
