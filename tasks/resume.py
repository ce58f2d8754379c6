"""Where a run goes on: the checkpoint it resumes from, and what a changed recipe may not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.recipe import Recipe, differences, parse_recipe
from tasks.checkpointing import Progress
from tasks.data.dataset import PackedDataset
from tiers.checkpoint import newest_complete
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

    @classmethod
    def of(cls, directory: Path) -> ResumePoint:
        """Read a complete checkpoint.

        Raises:
            CheckpointError: Its manifest cannot be read.
        """
        facts = read_manifest(directory).facts
        return cls(directory, Progress.of(facts), facts.data_fingerprint)


def find_resume_point(recipe: Recipe, say: Callable[[str], None]) -> ResumePoint | None:
    """Find the checkpoint that the recipe resumes from; None for a run that starts anew.

    Raises:
        ResumeError: There are checkpoints where none may be, or the recipe has changed what would be learned.
        CheckpointError: The checkpoint that was named is not complete.
    """
    run = recipe.run
    if isinstance(run.resume, Path):
        directory: Path | None = run.resume
        problems = verify(run.resume, deep=False)
        if problems:
            raise CheckpointError(f"run.resume = {run.resume} is no checkpoint to resume from: {problems[0]}")
    else:
        directory, skipped = newest_complete(run.dir)
        for passed in skipped:
            say(f"passed over {passed.path.name}: {passed.reason}")
        if directory is not None and run.resume == "never":
            raise ResumeError(
                f'run.resume = "never", and {run.dir} holds {directory.name}; '
                'give another run.dir, or set run.resume = "auto" to go on from it'
            )
    if directory is None:
        return None
    _check_unchanged(keep_micro_batch(recipe, directory), _recipe_of(directory), directory)
    return ResumePoint.of(directory)


def keep_micro_batch(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe with its checkpoint's micro-batch where it leaves the choice open: sums keep their order.

    Raises:
        CheckpointError: The checkpoint's manifest cannot be read.
    """
    if recipe.train.micro_batch != "auto":
        return recipe
    sequences = _recipe_of(checkpoint).train.sequences_at_once
    # A changed step, where the recipe accepts that, may have no such part.
    return recipe if recipe.train.sequences_per_step % sequences else recipe.with_micro_batch(sequences)


def _recipe_of(checkpoint: Path) -> Recipe:
    return parse_recipe(read_manifest(checkpoint).facts.recipe, str(checkpoint))


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
