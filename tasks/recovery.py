"""Goes on after the loss of an actor: back to the newest checkpoint of the run, with new actors, a few times at most.

Only a death is recovered from. An error that an actor raises would come again, and it has a cause that a user can read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ActorLostError
from pipeline.recipe import recipe_toml
from pipeline.recipe.sections import RunSection
from tasks.attempt import Launch, attempt
from tasks.memory_account import MemoryAccount
from tasks.resume import ResumePoint, newest, same_command
from tasks.stop_signals import StopSignals
from tasks.training import Ending
from tiers.checkpoint import newest_complete, set_aside_after
from tiers.errors import CheckpointError


def run_with_recoveries(launch: Launch, signals: StopSignals, say: Callable[[str], None]) -> Ending:
    """Train to the end, or until a stop is requested.

    Raises:
        ActorLostError: An actor died once more than `run.max_recoveries` allows, or when a stop was already requested.
        RayError, PipelineError, TierError, OSError: The run failed.
        KeyboardInterrupt: A signal ended it before the first step; nothing was changed.
    """
    preparation, directory = launch.preparation, launch.directory
    run, resume, recoveries = preparation.recipe.run, launch.resume, 0

    def begin() -> None:
        if not directory.has_begun:
            make_way(run, launch.resume, say)
            account = MemoryAccount.of(preparation.spec.model_type, preparation.placement)
            directory.keep(recipe_toml(preparation.recipe), account)

    try:
        while True:
            try:
                return attempt(launch, resume, recoveries, begin, signals, say)
            except ActorLostError as error:
                if recoveries == run.max_recoveries or signals.requested():
                    raise
                recoveries += 1
                say(str(error))
            if directory.has_begun:
                resume = last_saved(run, launch.resume, say)
            start = resume.directory.name if resume else "the beginning, for there is no checkpoint yet"
            say(f"recovery {recoveries} of at most {run.max_recoveries}: new actors go on from {start}")
    except KeyboardInterrupt:
        # Nothing has been trained since that point.
        if resume is None or resume == launch.resume:
            raise
        say(f"stopped after step {resume.progress.step}; {same_command(run)} goes on from its checkpoint")
        return Ending.STOPPED
    except Exception:
        directory.leave()
        raise


def make_way(run: RunSection, start: ResumePoint | None, say: Callable[[str], None]) -> None:
    """Set aside what lies where a run that does not go on from the newest checkpoint will write its own."""
    if run.resume == "auto":
        return
    step = start.progress.step if start is not None else -1
    for path in set_aside_after(run.dir, step):
        say(f"the run starts {f'from step {step}' if start else 'anew'}: a later checkpoint is now {path}")


def last_saved(run: RunSection, start: ResumePoint | None, say: Callable[[str], None]) -> ResumePoint | None:
    """What a run that has begun goes on from: its newest checkpoint, or else where it started.

    Raises:
        CheckpointError: It has saved checkpoints, and none of them is whole.
    """
    elsewhere = isinstance(run.resume, Path)
    try:
        directory = newest(run.dir, say)
    except CheckpointError:
        if not elsewhere:
            raise
        return start
    found = ResumePoint.of(directory) if directory is not None else start
    # Earlier ones are of another run, which was here before: later ones were set aside.
    return start if elsewhere and not _is_later(found, start) else found


def way_on(run: RunSection, start: ResumePoint | None, *, has_begun: bool) -> str:
    """How the user goes on after a failure, as a clause.

    Args:
        run: Of the recipe.
        start: Where the run started; None for the beginning.
        has_begun: Whether it came to its first step: else nothing in its directory is its own.
    """
    try:
        directory, _ = newest_complete(run.dir)
        found = ResumePoint.of(directory) if directory is not None else None
    except (OSError, CheckpointError):  # the disk may be what failed
        return "the same command goes on from the newest checkpoint"
    command = same_command(run)
    if run.resume != "auto" and not (has_begun and _is_later(found, start)):
        found, command = start, "the same command"
    place = found.directory if found is not None else "the beginning, for there is no checkpoint yet"
    return f"{command} goes on from {place}"


def _is_later(found: ResumePoint | None, start: ResumePoint | None) -> bool:
    if found is None or start is None:
        return found is not None
    return found.progress.step > start.progress.step
