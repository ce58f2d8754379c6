"""A checkpoint that does not become complete leaves nothing: the disk that refused it is the one it lies on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from pipeline.coordinator import Coordinator
from support.stores import small_model
from tasks.checkpointing import Checkpoints, Progress
from tiers.checkpoint import partials
from tiers.errors import CheckpointError, ShardError
from tiers.layout import Precision
from tiers.shards import FileRecord


class FullDisk:
    """Stands for a coordinator whose snapshots find no room after the first of their files."""

    def snapshot(self, directory: Path) -> tuple[FileRecord, ...]:
        (directory / "first").write_bytes(b"x" * 4096)
        raise ShardError("write of 4096 bytes at 0 of second failed: [ENOSPC 28]")


def checkpoints_of(run_dir: Path) -> Checkpoints:
    settings = SimpleNamespace(every_steps=5, keep_last=1, keep_every=0)
    recipe: Any = SimpleNamespace(
        run=SimpleNamespace(dir=run_dir, seed=0), checkpoint=settings, train=SimpleNamespace(steps=5)
    )
    data: Any = SimpleNamespace(fingerprint="00", bytes_tokenised=True)
    return Checkpoints(recipe, small_model(Precision.FP32), data, "CPU", -1)


def test_a_last_checkpoint_that_finds_no_room_is_removed(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(tmp_path)
    with pytest.raises(ShardError, match="ENOSPC"):
        checkpoints.write_now(cast("Coordinator", FullDisk()), Progress(step=5))
    checkpoints.abandon()
    assert partials(tmp_path) == ()


@pytest.mark.ray
def test_a_checkpoint_that_cannot_be_published_is_removed_and_not_published_after_all(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.checkpointing.recipe_toml", lambda recipe: "")
    checkpoints = checkpoints_of(tmp_path)
    checkpoints.begin(5)
    checkpoints.submitted([ray.put(())])  # the layers' files are missing
    checkpoints.reached(Progress(step=5))
    with pytest.raises(CheckpointError, match="was not snapshotted"):
        checkpoints.collect(wait=True)
    assert len(partials(tmp_path)) == 1
    checkpoints.abandon()
    assert partials(tmp_path) == ()
