"""When a run is checkpointed, and how a checkpoint that is written while training goes on becomes complete."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from pipeline.coordinator import Coordinator
from pipeline.messages import DataPosition
from pipeline.recipe import Recipe, recipe_toml
from tasks.data.dataset import PackedDataset
from tiers.checkpoint import CheckpointWriter, begin, prune
from tiers.errors import TierError
from tiers.layout import ModelLayout
from tiers.manifest import Facts, SavedPosition
from tiers.shards import FileRecord

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "ray", "zarr", "numba", "numpy")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: all that changes from step to step besides weights and moments."""

    step: int = 0
    """Steps attempted."""
    applied_steps: int = 0
    skipped_steps: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    """Where the next step begins."""

    @classmethod
    def of(cls, facts: Facts) -> Progress:
        """As a checkpoint has it."""
        position = DataPosition(facts.data_position.epoch, facts.data_position.sequence)
        return cls(facts.step, facts.applied_steps, facts.skipped_steps, position)

    def after(self, step: int, position: DataPosition, *, applied: bool) -> Progress:
        """Of the run after one more attempted step."""
        assert step == self.step + 1
        return Progress(step, self.applied_steps + applied, self.skipped_steps + (not applied), position)


@dataclass
class _Pending:
    """A checkpoint that snapshots are still filling."""

    step: int
    refs: list[Any]
    progress: Progress | None = None
    """Known once the step's result is."""


@dataclass(frozen=True)
class _Publication:
    """A checkpoint that is being named, and older ones removed after it."""

    step: int
    path: Future[Path]


class Checkpoints:
    """The checkpoints of a run. One at a time is written; it is published once every layer of it is.

    Publishing goes on beside the steps, in a thread: a filesystem may take seconds to remove an older checkpoint, and
    the device would wait for the driver.
    """

    def __init__(self, recipe: Recipe, model: ModelLayout, data: PackedDataset, device: str, newest_step: int) -> None:
        """Write for a run that starts.

        Args:
            recipe: Of the run.
            model: Its layout.
            data: What it trains on.
            device: What it computes on.
            newest_step: Of the checkpoint that the run started from; -1 for none.
        """
        self._recipe = recipe
        self._model = model
        self._data = data
        self._device = device
        self._newest_step = newest_step
        self._pending: _Pending | None = None
        self._unpublished: CheckpointWriter | None = None
        """Of the checkpoint at work, until it is published and older ones are gone: what fails removes what it left."""
        self._publication: _Publication | None = None
        self._publisher = ThreadPoolExecutor(1, "publish")

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        every = self._recipe.checkpoint.every_steps
        return step == self._recipe.train.steps or bool(every and step % every == 0)

    def can_begin(self) -> bool:
        """Whether another checkpoint may begin: the step of the one at work, if any, is over."""
        return self._pending is None or self._pending.progress is not None

    def begin(self, step: int) -> Path:
        """Start the checkpoint of a step, once `can_begin`; an earlier one that is still being written is waited for.

        Raises:
            CheckpointError: The disk has no room for it; or the earlier one could not be published.
            OSError: Likewise of the earlier one.
        """
        assert self.can_begin(), f"the checkpoint before step {step} would never be published"
        self.collect(wait=True)
        self._unpublished = begin(self._recipe.run.dir, step, self._model)
        self._pending = _Pending(step, [])
        return self._unpublished.directory

    def submitted(self, refs: list[Any]) -> None:
        """Say which calls fill the checkpoint that was begun last."""
        assert self._pending is not None
        self._pending.refs = refs

    def reached(self, progress: Progress) -> None:
        """Say that a step is over, so that its checkpoint may state how far the run was."""
        if self._pending is not None and self._pending.step == progress.step:
            self._pending.progress = progress

    def collect(self, *, wait: bool) -> Path | None:
        """Have the checkpoint at work published once it is written; return its path once that is done.

        Args:
            wait: For the files and for the end of publishing. A checkpoint whose step is not over is not waited for.

        Raises:
            CheckpointError, OSError: It could not be published.
        """
        self._begin_to_publish(wait=wait)
        publication = self._publication
        if publication is None or not (wait or publication.path.done()):
            return None
        self._publication = None
        return self._published(publication)

    def write_now(self, coordinator: Coordinator, progress: Progress) -> Path | None:
        """Write a checkpoint of the run as it is, unless the newest one is just that. Nothing may be in flight."""
        self.collect(wait=True)
        if progress.step == self._newest_step:
            return None
        self._unpublished = begin(self._recipe.run.dir, progress.step, self._model)
        return self._published(self._publish(coordinator.snapshot(self._unpublished.directory), progress))

    def abandon(self) -> None:
        """The run has failed: publish the checkpoint at work if every layer of it is written, else remove it."""
        try:
            self._begin_to_publish(wait=False)
            self._pending = None
            self.collect(wait=True)
        except RayError:
            pass  # of an actor that the run has failed by: said already
        except (TierError, OSError) as error:
            logger.warning("of the checkpoint that was being written when the run failed: %s", error)
        finally:
            self._publisher.shutdown()  # nothing is removed under its hands
            self._pending = None
            if self._unpublished is not None:
                self._unpublished.discard()
                self._unpublished = None

    def _begin_to_publish(self, *, wait: bool) -> None:
        """Hand the checkpoint at work to the publisher if its step is over and it is written, or once it is."""
        pending = self._pending
        if pending is None or pending.progress is None:
            return
        ready, _ = ray.wait(pending.refs, num_returns=len(pending.refs), timeout=None if wait else 0)
        if len(ready) < len(pending.refs):
            return
        records = [record for layer in ray.get(pending.refs) for record in layer]
        # Not tried twice: of what a failed fsync has lost the next one knows nothing.
        self._pending = None
        self._publication = self._publish(records, pending.progress)

    def _publish(self, records: Sequence[FileRecord], progress: Progress) -> _Publication:
        assert self._unpublished is not None
        writer, settings, run_dir = self._unpublished, self._recipe.checkpoint, self._recipe.run.dir
        facts = self._facts(progress)

        def publish() -> Path:
            path = writer.publish(records, facts)
            prune(run_dir, keep_last=settings.keep_last, keep_every=settings.keep_every)
            return path

        return _Publication(progress.step, self._publisher.submit(publish))

    def _published(self, publication: _Publication) -> Path:
        """Wait for it, and take note."""
        path = publication.path.result()
        self._unpublished = None
        self._newest_step = publication.step
        return path

    def _facts(self, progress: Progress) -> Facts:
        return Facts(
            step=progress.step,
            applied_steps=progress.applied_steps,
            skipped_steps=progress.skipped_steps,
            data_position=SavedPosition(epoch=progress.position.epoch, sequence=progress.position.sequence),
            data_fingerprint=self._data.fingerprint,
            bytes_tokenised=self._data.bytes_tokenised,
            seed=self._recipe.run.seed,
            recipe=recipe_toml(self._recipe),
            device=self._device,
            libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
            precision=self._model.precision,
            num_parameters=self._model.num_parameters,
        )
