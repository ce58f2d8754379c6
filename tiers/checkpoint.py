"""Checkpoints of a run directory: written aside, published by one rename, pruned after that.

`checkpoints/step-000010.partial` becomes `step-000010` when every file and the manifest are durable, so that a name
without suffix is complete whatever moment the process dies in. One process of a run writes checkpoints: the driver.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tiers.durable_files import make_directory, sync_directory, sync_file
from tiers.errors import CheckpointError, ShardError
from tiers.layout import PAGE_BYTES, ModelLayout, stored_buffers
from tiers.manifest import Facts, Manifest, verify, write_manifest
from tiers.preflight import check_free_bytes
from tiers.shard_store import write_metadata
from tiers.shards import FileRecord, shard_path, store_bytes
from tiers.store_metadata import root_metadata

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Being written, or left by a process that died."""
REPLACED = ".replaced"
"""The complete checkpoint that had this step's name, for the moment between two renames."""
ASIDE = ".aside"
"""What had this step's name and is no checkpoint, or one that the run went back behind: kept, it is the user's."""
METADATA_BYTES = 1 << 20
"""Room for the manifest and what belongs to the whole store."""
SHARD_BYTES = 5 * PAGE_BYTES
"""Room that a filesystem takes for a shard beside its bytes: `zarr.json`, two folders, the end of its last block, and
its share of the layer's folder and metadata."""

_NAME = re.compile(rf"step-(\d{{6,}})({re.escape(PARTIAL)}|{re.escape(REPLACED)})?")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A directory that looks like a checkpoint and may not be resumed from."""

    path: Path
    reason: str


def required_bytes(model: ModelLayout) -> int:
    """Disk space of one checkpoint: what a plan multiplies by the number kept, plus one while it is written."""
    shards = len(model.layers) * len(stored_buffers(model.precision))
    return store_bytes(model) + METADATA_BYTES + shards * SHARD_BYTES


class CheckpointWriter:
    """A checkpoint being written under `directory`; the Prefetcher's snapshots fill it, then `publish` names it."""

    def __init__(self, directory: Path, target: Path, model: ModelLayout, root: FileRecord) -> None:
        self.directory = directory
        self._target = target
        self._model = model
        self._root = root

    def publish(self, files: Iterable[FileRecord], facts: Facts) -> Path:
        """Make the checkpoint complete and durable.

        Args:
            files: What every layer's snapshot returned.
            facts: What the run needs to go on.

        Returns:
            The checkpoint's final path.

        Raises:
            CheckpointError: A shard of a layer is missing or has another size than its record; nothing is published.
            OSError: The disk refuses; the partial directory remains.
        """
        manifest = Manifest(created=datetime.now(UTC), facts=facts, files=(self._root, *files))
        self._check_complete(manifest)
        for record in manifest.files:
            sync_file(self.directory / record.path)
        for directory in sorted((path for path in self.directory.rglob("*") if path.is_dir()), reverse=True):
            sync_directory(directory)
        write_manifest(self.directory, manifest)
        replaced = self._clear_target()
        self.directory.rename(self._target)
        for parent in (self._target.parent, self._target.parents[1]):
            sync_directory(parent)
        if replaced is not None:
            shutil.rmtree(replaced)
        logger.info("checkpoint %s complete", self._target)
        return self._target

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _check_complete(self, manifest: Manifest) -> None:
        records = manifest.records()
        for layer in self._model.layers:
            for buffer in stored_buffers(self._model.precision):
                path = shard_path(layer, buffer)
                if path not in records or f"{layer.name}/{buffer}/zarr.json" not in records:
                    raise CheckpointError(
                        f"cannot publish {self._target}: {path} of {layer.name} was not snapshotted; "
                        "every layer's snapshot must end before publish"
                    )
        for record in manifest.files:
            file = self.directory / record.path
            num_bytes = file.stat().st_size if file.is_file() else 0
            if num_bytes != record.num_bytes:
                raise CheckpointError(
                    f"cannot publish {self._target}: {file} has {num_bytes} bytes, its snapshot wrote "
                    f"{record.num_bytes}"
                )

    def _clear_target(self) -> Path | None:
        """Move away what has the final name; return it where it is an older checkpoint, to be removed afterwards."""
        if not self._target.exists() and not self._target.is_symlink():
            return None
        if not verify(self._target, deep=False):
            replaced = self._target.with_name(self._target.name + REPLACED)
            if replaced.exists():
                shutil.rmtree(replaced)
            return self._target.rename(replaced)
        logger.warning("%s is no complete checkpoint; moved to %s", self._target, _set_aside(self._target))
        return None


def begin(run_dir: Path, step: int, model: ModelLayout) -> CheckpointWriter:
    """Start the checkpoint of `step`: attempts of dead writers are removed, free space is checked.

    Raises:
        CheckpointError: The disk has less free than a checkpoint needs, or refuses the directory.
    """
    target = run_dir / "checkpoints" / f"step-{step:06}"
    directory = target.with_name(target.name + PARTIAL)
    try:
        make_directory(target.parent)
        # One at a time is written, so that all of them are worth nothing; this one may need their room.
        for partial in partials(run_dir):
            partial.unlink() if partial.is_symlink() or partial.is_file() else shutil.rmtree(partial)
        check_free_bytes(target.parent, required_bytes(model))
        make_directory(directory)
        root = write_metadata(directory, root_metadata(model))
    except (OSError, ShardError) as error:
        raise CheckpointError(f"cannot begin the checkpoint of step {step}: {error}") from error
    return CheckpointWriter(directory, target, model, root)


def newest_complete(run_dir: Path) -> tuple[Path | None, tuple[Skipped, ...]]:
    """Find the checkpoint to resume from.

    Returns:
        The complete checkpoint of the highest step, None where there is none; and every newer directory that was
        passed over, with the reason, newest first.
    """
    skipped: list[Skipped] = []
    for _, path in _steps(run_dir):
        problem = _problem(path)
        if problem is None:
            return path, tuple(skipped)
        skipped.append(Skipped(path, problem))
    return None, tuple(skipped)


def complete_steps(run_dir: Path) -> tuple[tuple[int, Path], ...]:
    """Every step that there is a complete checkpoint of, ascending, with its path."""
    found = {step: path for step, path in reversed(_steps(run_dir)) if _problem(path) is None}
    return tuple(sorted(found.items()))


def partials(run_dir: Path) -> tuple[Path, ...]:
    """What is being written, or was when its writer died: `begin` removes it."""
    return tuple(path for _, path in _steps(run_dir) if path.suffix == PARTIAL)


def complete_before(checkpoint: Path) -> Path | None:
    """The complete checkpoint of the highest step below that of `checkpoint` in the same run directory."""
    steps = _steps(checkpoint.parents[1])
    own = next((step for step, path in steps if path == checkpoint), 0)
    return next((path for step, path in steps if step < own and _problem(path) is None), None)


def prune(run_dir: Path, *, keep_last: int, keep_every: int = 0) -> tuple[Path, ...]:
    """Remove complete checkpoints that are not to be kept, and what dead writers left. Call after `publish` only.

    Args:
        run_dir: Of the run.
        keep_last: How many of the newest complete ones stay, at least 1; damaged ones do not count.
        keep_every: Steps that are multiples of it stay too; 0 for none.

    Returns:
        What was removed.
    """
    if keep_last < 1 or keep_every < 0:
        raise ValueError(f"keep_last is {keep_last} and keep_every {keep_every}; at least 1 and 0 are needed")
    found = [(step, path, _problem(path)) for step, path in _steps(run_dir)]
    complete = [(step, path) for step, path, problem in found if problem is None]
    if not complete:
        return ()
    doomed = [path for step, path, problem in found if problem and path.suffix == PARTIAL and step <= complete[0][0]]
    doomed += [path for step, path in complete if path.suffix == REPLACED and (step, path.with_suffix("")) in complete]
    kept = [(step, path) for step, path in complete if path not in doomed]
    doomed += [path for step, path in kept[keep_last:] if not keep_every or step % keep_every]
    for path in doomed:
        # Marked first: a removal that a crash cuts short leaves a partial directory, never a damaged checkpoint.
        partial = path if path.suffix == PARTIAL else path.rename(path.with_name(f"{path.stem}{PARTIAL}"))
        shutil.rmtree(partial)
    return tuple(doomed)


def set_aside_after(run_dir: Path, step: int) -> tuple[Path, ...]:
    """Rename the checkpoints of later steps, for a run that goes back to `step`: it will write those steps anew.

    Otherwise a later resume would take them for the newest, and pruning would remove the new ones.

    Returns:
        Their new names; they are neither resumed from nor pruned.
    """
    later = [path for found, path in _steps(run_dir) if found > step and path.suffix != PARTIAL]
    return tuple(map(_set_aside, later))


def _set_aside(path: Path) -> Path:
    for number in range(1000):
        aside = path.with_name(f"{path.name}{ASIDE}-{number}")
        if not aside.exists():
            return path.rename(aside)
    raise CheckpointError(f"{path} is in the way, and so are {aside} and those before it; remove them")


def _steps(run_dir: Path) -> list[tuple[int, Path]]:
    """Directories named as checkpoints are, newest step first; of one step the final name first."""
    root = run_dir / "checkpoints"
    names = [(path, _NAME.fullmatch(path.name)) for path in (root.iterdir() if root.is_dir() else ())]
    steps = [(int(match.group(1)), match.group(2) or "", path) for path, match in names if match is not None]
    steps.sort(key=lambda found: found[1])
    steps.sort(key=lambda found: found[0], reverse=True)
    return [(step, path) for step, _, path in steps]


def _problem(path: Path) -> str | None:
    """Why a directory is no checkpoint to resume from."""
    if path.suffix == PARTIAL:
        return "the process that wrote it ended before it was complete"
    problems = verify(path, deep=False)
    if not problems:
        return None
    return problems[0] + (f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else "")
