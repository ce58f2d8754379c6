"""Goes on after the loss of an actor: back to the newest complete checkpoint, with new actors, a few times at most.

Only a death is recovered from. An error that an actor raises would come again, and it has a cause that a user can read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ActorLostError
from tasks.attempt import Launch, attempt
from tasks.resume import ResumePoint
from tasks.stop_signals import StopSignals
from tasks.training import Ending
from tiers.checkpoint import newest_complete, set_aside_after


def run_with_recoveries(launch: Launch, signals: StopSignals, say: Callable[[str], None]) -> Ending:
    """Train to the end, or until a stop is requested.

    Raises:
        ActorLostError: An actor died once more than `run.max_recoveries` allows, or when a stop was already requested.
        RayError, PipelineError, TierError, OSError: The run failed.
    """
    run, resume = launch.preparation.recipe.run, launch.resume
    if isinstance(run.resume, Path) and resume is not None:
        for path in set_aside_after(run.dir, resume.progress.step):
            say(f"the run goes back to step {resume.progress.step}: a later checkpoint is now {path}")
    recoveries = 0
    while True:
        try:
            return attempt(launch, resume, recoveries, signals, say)
        except ActorLostError as error:
            if recoveries == run.max_recoveries or signals.requested():
                raise
            recoveries += 1
            say(str(error))
        resume = _newest(run.dir, say) or launch.resume
        start = resume.directory.name if resume else "the beginning, for there is no checkpoint yet"
        say(f"recovery {recoveries} of at most {run.max_recoveries}: new actors go on from {start}")


def _newest(run_dir: Path, say: Callable[[str], None]) -> ResumePoint | None:
    """What this run wrote last; its recipe is the run's own."""
    directory, skipped = newest_complete(run_dir)
    for passed in skipped:
        say(f"passed over {passed.path.name}: {passed.reason}")
    return ResumePoint.of(directory) if directory is not None else None
