"""A checkpoint that does not become complete leaves nothing: the disk that refused it is the one it lies on. One that
does is published while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from pipeline.coordinator import Coordinator
from support.stores import random_arrays, small_model, write_layer
from tasks import checkpointing
from tasks.checkpointing import Checkpoints, Progress
from tiers.checkpoint import newest_complete, partials
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError, ShardError
from tiers.layout import Precision
from tiers.shard_store import ShardStore
from tiers.shards import FileRecord

MODEL = small_model(Precision.FP32)


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
    return Checkpoints(recipe, MODEL, data, "CPU", -1)


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


@pytest.mark.ray
def test_a_publication_that_fails_as_the_run_does_is_told_of_and_removed(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "recipe_toml", lambda recipe: "")
    checkpoints = checkpoints_of(tmp_path)
    checkpoints.begin(5)
    checkpoints.submitted([ray.put(())])
    checkpoints.reached(Progress(step=5))
    checkpoints.abandon()
    assert "being written when the run failed" in caplog.text and "was not snapshotted" in caplog.text
    assert partials(tmp_path) == () and newest_complete(tmp_path) == (None, ())


def write_all(directory: Path) -> tuple[FileRecord, ...]:
    with DirectIO(requests=1) as io:
        store = ShardStore(directory, MODEL, io, DirectMode.BUFFERED)
        layers = [write_layer(store, layer, random_arrays(MODEL, layer, seed=1)) for layer in MODEL.layers]
    return tuple(record for records in layers for record in records)


@pytest.mark.ray
@pytest.mark.parametrize("end", ["collect", "begin", "abandon"])
def test_steps_go_on_while_older_checkpoints_are_removed_and_who_needs_the_end_of_it_waits(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(checkpointing, "recipe_toml", lambda recipe: "")
    prune, removing, may_end = checkpointing.prune, threading.Event(), threading.Event()

    def slow_prune(run_dir: Path, *, keep_last: int, keep_every: int) -> object:
        removing.set()
        assert may_end.wait(60)
        return prune(run_dir, keep_last=keep_last, keep_every=keep_every)

    monkeypatch.setattr(checkpointing, "prune", slow_prune)
    checkpoints, paths = checkpoints_of(tmp_path), []
    for step in (5, 10):
        directory = checkpoints.begin(step)
        checkpoints.submitted([ray.put(write_all(directory))])
        assert checkpoints.collect(wait=True) is None  # its step is not over
        checkpoints.reached(Progress(step=step))
        assert checkpoints.collect(wait=False) is None
        assert removing.wait(60)
        removing.clear()
        assert checkpoints.collect(wait=False) is None and checkpoints.can_begin()
        paths.append(directory.with_suffix(""))
        assert newest_complete(tmp_path)[0] == paths[-1]
        if step == 5:
            may_end.set()
            assert checkpoints.collect(wait=True) == paths[0]
            may_end.clear()
    assert paths[0].exists()
    threading.Timer(0.3, may_end.set).start()
    match end:
        case "collect":
            assert checkpoints.collect(wait=True) == paths[1]
        case "begin":
            assert checkpoints.begin(15).is_dir()
        case _:
            checkpoints.abandon()
    assert not paths[0].exists() and newest_complete(tmp_path)[0] == paths[1]
    checkpoints.abandon()
    assert partials(tmp_path) == () and newest_complete(tmp_path)[0] == paths[1]
