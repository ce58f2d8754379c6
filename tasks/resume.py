"""Where a run goes on: the checkpoint it resumes from, and what a changed recipe may not change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.placement import PlacementError
from pipeline.prediction.hardware import Hardware
from pipeline.recipe import Recipe, differences, parse_recipe
from pipeline.recipe.sections import RunSection
from tasks.checkpointing import Progress
from tasks.data.dataset import PackedDataset
from tasks.preparation import Preparation, prepare
from tiers.checkpoint import PARTIAL, newest_complete
from tiers.errors import CheckpointError
from tiers.manifest import read_manifest, verify

SHAPES_DATA = ("train.sequence_length", "run.seed")
"""Keys outside `[data]` that decide which tokens are at a position."""


class ResumeError(ValueError):
    """The run directory or the recipe does not allow the resume that was asked for."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to go on from."""

    directory: Path
    progress: Progress
    data_fingerprint: str
    """Of the data that it was trained on; empty where that is not known."""
    device: str = ""
    """What it was trained on; likewise."""

    @classmethod
    def of(cls, directory: Path) -> ResumePoint:
        """Read a complete checkpoint.

        Raises:
            CheckpointError: Its manifest cannot be read.
        """
        facts = read_manifest(directory).facts
        return cls(directory, Progress.of(facts), facts.data_fingerprint, facts.device)


def find_resume_point(recipe: Recipe, say: Callable[[str], None]) -> ResumePoint | None:
    """Find the checkpoint that the recipe resumes from; None for a run that starts anew.

    Raises:
        ResumeError: There are checkpoints where none may be, or the recipe has changed what would be learned.
        CheckpointError: The checkpoint that was named is not complete, or none of those that there are is.
    """
    run = recipe.run
    if isinstance(run.resume, Path):
        directory: Path | None = run.resume
        problems = verify(run.resume, deep=False)
        if problems:
            raise CheckpointError(f"run.resume = {run.resume} is no checkpoint to resume from: {problems[0]}")
    elif run.resume == "never":
        directory, _ = newest_complete(run.dir)
        if directory is not None:
            raise ResumeError(
                f'run.resume = "never", and {run.dir} holds {directory.name}; '
                'give another run.dir, or set run.resume = "auto" to go on from it'
            )
    else:
        directory = newest(run.dir, say)
    if directory is None:
        return None
    _check_unchanged(keep_choices(recipe, directory), _recipe_of(directory), directory)
    return ResumePoint.of(directory)


def newest(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint; None where none was ever completed.

    Raises:
        CheckpointError: None of those that were completed is whole any more: to start anew would drop what is known of
            their steps.
    """
    directory, skipped = newest_complete(run_dir)
    if directory is None and (damaged := [passed for passed in skipped if passed.path.suffix != PARTIAL]):
        raise CheckpointError(
            f"{run_dir} has no whole checkpoint to go on from: "
            + "; ".join(f"{passed.path.name}: {passed.reason}" for passed in damaged)
            + '. Put back what is missing, or start anew: run.resume = "never" sets aside what is left of them, and '
            "another run.dir leaves it as it is"
        )
    for passed in skipped:
        say(f"passed over {passed.path.name}: {passed.reason}")
    return directory


def same_command(run: RunSection) -> str:
    """What goes on from the checkpoints that a run leaves."""
    return "the same command" if run.resume == "auto" else 'the same command with run.resume = "auto"'


def keep_choices(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe with what its checkpoint's plan chose where it leaves that open, so that sums keep their order.

    What it accepts a change of is left to the plan.

    Raises:
        CheckpointError: The checkpoint's manifest cannot be read.
    """
    before, accepted = _recipe_of(checkpoint), recipe.run.accept_changes
    sequences = before.train.sequences_at_once
    # A changed step, where the recipe accepts that, may have no such part.
    divides = recipe.train.sequences_per_step % sequences == 0
    if recipe.train.micro_batch == "auto" and divides and "train.micro_batch" not in accepted:
        recipe = recipe.with_micro_batch(sequences)
    kept = {
        key: value
        for key in ("mlp_chunk_tokens", "kept_layers")
        if getattr(recipe.memory, key) is None
        and (value := getattr(before.memory, key)) is not None
        and f"memory.{key}" not in accepted
    }
    return recipe.with_memory(**kept)


def prepare_resumed(
    recipe: Recipe, resume: ResumePoint, say: Callable[[str], None], hardware: Hardware | None = None
) -> Preparation:
    """Prepare a recipe that goes on from a checkpoint with its choices, and say what rounds otherwise all the same.

    Raises:
        As `prepare`. Where it does not fit, the message tells how to have the plan choose anew.
    """
    kept = keep_choices(recipe, resume.directory)
    try:
        preparation = prepare(kept, hardware)
    except PlacementError as error:
        # Of kept layers it takes as many as fit.
        chosen = [each for each in differences(recipe, kept) if each.key != "memory.kept_layers"]
        if not chosen:
            raise
        raise PlacementError(
            f"{error}. That is with what {resume.directory} was trained with ("
            + ", ".join(f"{each.key} = {each.after}" for each in chosen)
            + "); to have the plan choose anew, by which sums round otherwise: run.accept_changes = ["
            + ", ".join(f'"{each.key}"' for each in chosen)
            + "]"
        ) from error
    changes = rounding_changes(_recipe_of(resume.directory), preparation)
    if resume.device not in ("", preparation.device):
        changes = [f"device: {resume.device} -> {preparation.device}", *changes]
    if changes:
        say(
            f"note: goes on from {resume.directory.name} with " + "; ".join(changes) + ": sums round otherwise, so the "
            "result will not equal that of a run without a stop in every bit"
        )
    return preparation


def rounding_changes(before: Recipe, preparation: Preparation) -> list[str]:
    """What of a changed recipe or placement is taken although it changes bits, which it does on CUDA alone."""
    if not preparation.cuda or before.memory.kept_layers is None:
        return []
    found = differences(before, preparation.recipe)
    return [str(each) for each in found if each.key in ("train.compile", "memory.kept_layers")]


def _recipe_of(checkpoint: Path) -> Recipe:
    return parse_recipe(_in_this_copy(read_manifest(checkpoint).facts.recipe), str(checkpoint))


_JOBS_COPY = re.compile(r'/[^"\n]*?/_ray_pkg_[0-9a-f]+(?=[/"])')
"""A job runs in a copy of its working directory, whose place follows from the head and from what is in it."""


def _in_this_copy(recipe: str) -> str:
    """A recorded recipe with paths in its own copy of the working directory taken for those in this one."""
    return _JOBS_COPY.sub(lambda _: str(Path.cwd()), recipe)


def check_data(recipe: Recipe, resume: ResumePoint, data: PackedDataset, say: Callable[[str], None]) -> None:
    """Refuse to go on in other data than the checkpoint's position counts in, unless the recipe accepts a change of it.

    Raises:
        ResumeError: The documents have changed, or are fewer than the position says.
    """
    paths = ", ".join(map(str, recipe.data.path))
    accepted = any(key.startswith("data.") or key in SHAPES_DATA for key in recipe.run.accept_changes)
    known = resume.data_fingerprint
    if known == data.fingerprint_without_labels != data.fingerprint:
        say(
            f"note: {resume.directory} was written before labels were part of the data's fingerprint: the documents "
            "are the same, and whether their labels are was not checked"
        )
    elif known not in ("", data.fingerprint) and not accepted:
        raise ResumeError(
            f"{resume.directory} was trained on other documents or labels than {paths} holds now: its place in them "
            "would mean something else. Put the data back, start in another run.dir, or accept it: "
            'run.accept_changes = ["data.path"]'
        )
    sequence = resume.progress.position.sequence
    if sequence >= data.num_sequences:
        raise ResumeError(
            f"{resume.directory} goes on at sequence {sequence} of an epoch, and {paths} now makes "
            f"{data.num_sequences} sequences; give the data that it was trained on, or start in another run.dir"
        )


def _check_unchanged(recipe: Recipe, before: Recipe, directory: Path) -> None:
    """Refuse what would make the run learn something else than it set out to, unless the recipe accepts it by name."""
    same_rate = recipe.learning_rate() == before.learning_rate() or recipe.optimizer.schedule == "constant"
    changed = [
        difference
        for difference in differences(before, recipe)
        if difference.changes_result
        and difference.key not in recipe.run.accept_changes
        and not (difference.key == "train.steps" and same_rate)
    ]
    if changed:
        raise ResumeError(
            f"{directory} was trained with another recipe: "
            + "; ".join(map(str, changed))
            + ". Undo the change, start in another run.dir, or accept it: run.accept_changes = ["
            + ", ".join(f'"{difference.key}"' for difference in changed)
            + "]"
        )
