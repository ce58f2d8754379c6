"""Whether a run's checkpoints find room on its disk: how many lie there at a time, beside what else the run puts there.

`tasks.plan` shows it, `tasks.train` refuses by it. Looks at names and sizes, writes nothing.
"""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.memory.footprint import Place
from pipeline.placement import Placement
from pipeline.recipe import Recipe
from tiers.checkpoint import complete_steps, partials, required_bytes
from tiers.errors import CheckpointError
from tiers.manifest import read_manifest
from tiers.preflight import nearest_existing
from tiers.quantities import shown_bytes
from tiers.scratch import abandoned_bytes, bytes_on_disk


class DiskRoomError(ValueError):
    """The disk of a run's directory has no room for its checkpoints. Nothing has been written."""


@dataclass(frozen=True, slots=True)
class RunDisk:
    """The file system of a run's directory, and what of the run is on it already."""

    directory: Path
    """`run.dir`."""
    free_bytes: int
    """With what the run removes before it writes: what dead writers have left."""
    start: int
    """Step that the run goes on from."""
    held: tuple[int, ...] = ()
    """Steps of the complete checkpoints up to it, ascending."""
    held_bytes: int = 0
    """Of the largest of them."""
    shared: bool = False
    """Whether `memory.nvme_dir` is on the same file system."""

    @classmethod
    def of(cls, recipe: Recipe, start: int | None = None) -> RunDisk:
        """Look at the disk.

        Args:
            recipe: Of the run.
            start: Step that it goes on from; None finds out as a run does.
        """
        run_dir, nvme_dir = recipe.run.dir, recipe.memory.nvme_dir
        complete = complete_steps(run_dir)
        if start is None:
            start = _start(recipe, complete)
        held = [(step, path) for step, path in complete if step <= start]
        there = nearest_existing(run_dir)
        shared = nvme_dir is not None and nvme_dir.is_dir() and nvme_dir.stat().st_dev == there.stat().st_dev
        return cls(
            directory=run_dir,
            free_bytes=shutil.disk_usage(there).free
            + sum(map(bytes_on_disk, partials(run_dir)))
            + (abandoned_bytes(nvme_dir) if shared and nvme_dir is not None else 0),
            start=start,
            held=tuple(step for step, _ in held),
            held_bytes=max((bytes_on_disk(path) for _, path in held), default=0),
            shared=shared,
        )


@dataclass(frozen=True)
class CheckpointFigures:
    """What checkpoints take."""

    bytes_each: int
    """Uncompressed."""
    kept: int
    """Most at a time: those of keep_last, those that keep_every keeps to the end of the run, and the one being
    written."""
    needed_bytes: int
    """For all of them at once."""
    missing_bytes: int
    """Of that, what is not on the disk yet."""
    scratch_bytes: int
    """NVMe working files on the same file system."""
    free_bytes: int | None
    """Where the run's directory is; None where the machine is only described."""
    refusal: str | None = None
    """Why they have no room, and what makes some; None where they have, or where that is not known."""


def checkpoint_figures(recipe: Recipe, placement: Placement, disk: RunDisk | None) -> CheckpointFigures:
    """Size and number of a run's checkpoints, held against its disk.

    Args:
        recipe: Of the run.
        placement: Of its model.
        disk: Of its directory; None where it is not known.
    """
    looked_at = disk or RunDisk(recipe.run.dir, 0, 0)
    figures = _figures(recipe, placement, looked_at)
    if disk is None:
        return replace(figures, free_bytes=None)
    return figures if _fits(figures) else replace(figures, refusal=_refusal(recipe, placement, disk, figures))


def require_checkpoint_room(recipe: Recipe, placement: Placement, start: int) -> None:
    """Refuse a run whose checkpoints would fill its disk.

    Raises:
        DiskRoomError: The message names needed and free bytes and what to change.
    """
    refusal = checkpoint_figures(recipe, placement, RunDisk.of(recipe, start)).refusal
    if refusal is not None:
        raise DiskRoomError(refusal)


def _figures(recipe: Recipe, placement: Placement, disk: RunDisk) -> CheckpointFigures:
    each = required_bytes(placement.tier.model)
    kept = most_at_a_time(recipe, disk.start, disk.held)
    # What is known of compressed ones is how large those before were; room for a whole one is asked for each time.
    stored = disk.held_bytes if disk.held and recipe.checkpoint.compression != "none" else each
    more = kept - len(disk.held)
    return CheckpointFigures(
        bytes_each=each,
        kept=kept,
        needed_bytes=each * kept,
        missing_bytes=each + (more - 1) * stored if more > 0 else 0,
        scratch_bytes=placement.used(Place.NVME) if disk.shared else 0,
        free_bytes=disk.free_bytes,
    )


def _fits(figures: CheckpointFigures) -> bool:
    # A run that writes no checkpoint any more asks for nothing.
    assert figures.free_bytes is not None
    return not figures.missing_bytes or figures.missing_bytes + figures.scratch_bytes <= figures.free_bytes


def most_at_a_time(recipe: Recipe, start: int, held: Sequence[int]) -> int:
    """The most checkpoints that lie on the disk at one moment of a run.

    An old one goes only when the new one is complete, so that for a while there is one more than is kept.

    Args:
        recipe: Of the run.
        start: Step that it goes on from.
        held: Steps of the complete checkpoints that there are already, ascending.
    """
    section, steps = recipe.checkpoint, recipe.train.steps
    if start >= steps:
        return len(held)
    # Those of the run's end, and before it; their number at a time never falls from one to the next.
    every = section.every_steps or steps
    due = range((start // every + 1) * every, steps, every)
    recent = min(len(due), section.keep_last)
    older, old = due[: len(due) - recent], held[: max(0, len(held) - (section.keep_last - recent))]
    for_ever = 0
    if section.keep_every:
        for_ever = sum(step % section.keep_every == 0 for step in old)
        if older:
            common = math.lcm(every, section.keep_every)
            for_ever += older[-1] // common - (older[0] - 1) // common
    before_last = min(len(held) + len(due), section.keep_last) + for_ever
    # The first one comes to all that there are, whatever was kept before.
    return max(before_last, len(held)) + 1


def _refusal(recipe: Recipe, placement: Placement, disk: RunDisk, figures: CheckpointFigures) -> str:
    assert figures.free_bytes is not None
    needed = figures.missing_bytes + figures.scratch_bytes
    there = f", {len(disk.held)} of them there already" if disk.held else ""
    scratch = ""
    if figures.scratch_bytes:
        scratch = f" and {shown_bytes(figures.scratch_bytes)} for memory.nvme_dir, which is on the same file system"
    remedies = [
        *_smaller(recipe, placement, disk, figures),
        f"run.dir on a disk with {shown_bytes(figures.needed_bytes)} free",
        f"{shown_bytes(needed - figures.free_bytes)} more free there",
    ]
    return (
        f"run.dir = {disk.directory} has no room for the run's checkpoints: at most {figures.kept} at a time{there} "
        f"(the old one goes when the new one is complete), {shown_bytes(figures.bytes_each)} each, need "
        f"{shown_bytes(figures.missing_bytes)} more{scratch}; {shown_bytes(figures.free_bytes)} are free. "
        "Any one of these makes it fit: " + "; ".join(remedies)
    )


def _smaller(recipe: Recipe, placement: Placement, disk: RunDisk, figures: CheckpointFigures) -> Iterator[str]:
    """Single changes of the recipe with which the checkpoints have been found to fit."""
    section = recipe.checkpoint

    def fits(**changes: int) -> bool:
        changed = recipe.model_copy(update={"checkpoint": section.model_copy(update=changes)})
        return _fits(_figures(changed, placement, disk))

    # Fewer never take more.
    keep_last = bisect_left(range(1, section.keep_last), True, key=lambda count: not fits(keep_last=count))
    if keep_last:
        yield f"checkpoint.keep_last = {keep_last}"
    if section.keep_every and fits(keep_every=0):
        yield "checkpoint.keep_every = 0"
    if section.every_steps and fits(every_steps=0):
        yield "checkpoint.every_steps = 0 (one, at the end)"
    if figures.scratch_bytes and _fits(_figures(recipe, placement, replace(disk, shared=False))):
        yield f"memory.nvme_dir on another disk with {shown_bytes(figures.scratch_bytes)} free"


def _start(recipe: Recipe, complete: Sequence[tuple[int, Path]]) -> int:
    """Step of the checkpoint that a run would go on from; 0 where there is none."""
    resume = recipe.run.resume
    if isinstance(resume, Path):
        with suppress(CheckpointError):
            return read_manifest(resume).facts.step
        return 0
    return complete[-1][0] if complete else 0
