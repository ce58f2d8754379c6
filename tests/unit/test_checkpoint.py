"""A checkpoint is there whole or not at all, whatever moment the process dies in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import random_arrays, saved_facts, small_model, write_layer
from tiers import checkpoint
from tiers.checkpoint import newest_complete, prune, required_bytes
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError
from tiers.layout import Buffer, Precision
from tiers.manifest import MANIFEST_NAME, read_manifest, verify
from tiers.preflight import preflight
from tiers.shard_store import ShardStore
from tiers.shards import FileRecord, shard_path

MODEL = small_model(Precision.FP32, layers=0)


def snapshot_all(directory: Path, io: DirectIO, seed: int) -> tuple[FileRecord, ...]:
    store = ShardStore(directory, MODEL, io, preflight(directory))
    records: tuple[FileRecord, ...] = ()
    for layer in MODEL.layers:
        records += write_layer(store, layer, random_arrays(MODEL, layer, seed))
    return records


def save(run_dir: Path, step: int, io: DirectIO) -> Path:
    writer = checkpoint.begin(run_dir, step, MODEL)
    return writer.publish(snapshot_all(writer.directory, io, seed=step), saved_facts(MODEL, step))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def io() -> Iterator[DirectIO]:
    with DirectIO(requests=2) as opened:
        yield opened


def test_a_published_checkpoint_is_the_newest_and_private(tmp_path: Path, io: DirectIO) -> None:
    assert newest_complete(tmp_path) == (None, ())
    for step in (5, 10):
        path = save(tmp_path, step, io)
    assert newest_complete(tmp_path) == (path, ()) and path == tmp_path / "checkpoints" / "step-000010"
    assert verify(path, deep=True) == [] and read_manifest(path).facts.step == 10
    assert {entry.stat().st_mode & 0o777 for entry in path.rglob("*") if entry.is_file()} == {0o600}
    assert {entry.stat().st_mode & 0o777 for entry in (path, *path.rglob("*")) if entry.is_dir()} == {0o700}


def test_a_missing_snapshot_is_not_published(tmp_path: Path, io: DirectIO) -> None:
    writer = checkpoint.begin(tmp_path, 10, MODEL)
    records = snapshot_all(writer.directory, io, seed=0)
    head = shard_path(MODEL.layers[1], Buffer.EXP_AVG)
    with pytest.raises(CheckpointError, match=rf"{head} of head was not snapshotted"):
        writer.publish([record for record in records if record.path != head], saved_facts(MODEL, 10))
    os.truncate(writer.directory / head, 4096)
    with pytest.raises(CheckpointError, match=rf"{head} has 4096 bytes, its snapshot wrote"):
        writer.publish(records, saved_facts(MODEL, 10))
    assert names(tmp_path) == ["step-000010.partial"]
    writer.discard()
    assert names(tmp_path) == []


def test_skipped_directories_are_named_with_reasons(tmp_path: Path, io: DirectIO) -> None:
    good, short, bare = save(tmp_path, 1, io), save(tmp_path, 2, io), save(tmp_path, 3, io)
    partial = checkpoint.begin(tmp_path, 4, MODEL).directory
    (short / shard_path(MODEL.layers[0], Buffer.WEIGHT)).unlink()
    (bare / MANIFEST_NAME).unlink()
    path, skipped = newest_complete(tmp_path)
    assert path == good and [skip.path for skip in skipped] == [partial, bare, short]
    assert [skip.reason for skip in skipped] == [
        "the process that wrote it ended before it was complete",
        f"{bare} has no {MANIFEST_NAME}: it was never completed",
        f"{short / shard_path(MODEL.layers[0], Buffer.WEIGHT)} cannot be read: No such file or directory",
    ]


@pytest.mark.parametrize("kind", ["directory", "file", "link", "partial", "partial file"])
def test_junk_with_the_name_of_the_step_does_not_stop_a_save(tmp_path: Path, io: DirectIO, kind: str) -> None:
    root = tmp_path / "checkpoints"
    junk = root / ("step-000010.partial" if "partial" in kind else "step-000010")
    (tmp_path / "elsewhere").mkdir()
    root.mkdir()
    if kind in ("directory", "partial"):
        (junk / "embedding").mkdir(parents=True)
        (junk / "embedding" / "notes.txt").write_text("mine")
    elif kind == "link":
        junk.symlink_to(tmp_path / "elsewhere")
    else:
        junk.write_text("mine")
    path = save(tmp_path, 10, io)
    assert newest_complete(tmp_path) == (path, ()) and not path.is_symlink()
    moved = [] if "partial" in kind else ["step-000010.aside-0"]
    assert names(tmp_path) == ["step-000010", *moved]
    assert (tmp_path / "elsewhere").is_dir()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path, io: DirectIO) -> None:
    save(tmp_path, 10, io)
    before = read_manifest(tmp_path / "checkpoints" / "step-000010").created
    path = save(tmp_path, 10, io)
    assert read_manifest(path).created > before and names(tmp_path) == ["step-000010"]


def test_between_the_two_renames_of_a_replacement_the_old_one_is_found(tmp_path: Path, io: DirectIO) -> None:
    path = save(tmp_path, 10, io)
    old = path.rename(path.with_name("step-000010.replaced"))
    assert newest_complete(tmp_path) == (old, ())
    save(tmp_path, 10, io)
    prune(tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-000010"]


def test_pruning_keeps_the_newest_and_the_milestones(tmp_path: Path, io: DirectIO) -> None:
    for step in range(1, 8):
        save(tmp_path, step, io)
    (tmp_path / "checkpoints" / "step-000007" / MANIFEST_NAME).unlink()  # damaged: may not take a place
    checkpoint.begin(tmp_path, 9, MODEL)
    prune(tmp_path, keep_last=2, keep_every=3)
    assert names(tmp_path) == [f"step-00000{step}" for step in (3, 5, 6, 7)] + ["step-000009.partial"]
    with pytest.raises(ValueError, match="keep_last is 0"):
        prune(tmp_path, keep_last=0)


def test_what_dead_writers_left_makes_room_for_the_next_checkpoint_whatever_its_step(
    tmp_path: Path, io: DirectIO
) -> None:
    save(tmp_path, 5, io)
    for step in (3, 9):
        (tmp_path / "checkpoints" / f"step-{step:06}.partial").mkdir()
    assert len(checkpoint.partials(tmp_path)) == 2
    path = checkpoint.begin(tmp_path, 7, MODEL).directory
    assert checkpoint.partials(tmp_path) == (path,)
    assert [step for step, _ in checkpoint.complete_steps(tmp_path)] == [5]


def test_a_run_that_goes_back_keeps_the_later_checkpoints_out_of_the_way(tmp_path: Path, io: DirectIO) -> None:
    paths = [save(tmp_path, step, io) for step in (5, 10, 15)]
    assert checkpoint.complete_before(paths[1]) == paths[0] and checkpoint.complete_before(paths[0]) is None
    moved = checkpoint.set_aside_after(tmp_path, 5)
    assert [path.name for path in moved] == ["step-000015.aside-0", "step-000010.aside-0"]
    assert newest_complete(tmp_path) == (paths[0], ())
    again = save(tmp_path, 10, io)
    assert prune(tmp_path, keep_last=1) == (paths[0],)
    assert newest_complete(tmp_path) == (again, ()) and all(verify(path, deep=True) == [] for path in moved)
    assert checkpoint.set_aside_after(tmp_path, 5)[0].name == "step-000010.aside-1"


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path, io: DirectIO) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", place], check=False).returncode:
        pytest.skip("may not mount")
    try:
        assert required_bytes(MODEL) < 1500 * 1024
        first = save(place, 1, io)
        with pytest.raises(CheckpointError, match=rf"checkpoint of step 2: .* needs {required_bytes(MODEL):,} bytes"):
            checkpoint.begin(place, 2, MODEL)
        assert newest_complete(place) == (first, ())  # the old one goes only when the new one is complete
    finally:
        subprocess.run(["umount", place], check=True)


CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def _save_until_event(run_dir: Path, fatal: int) -> None:
    """Save step 20 and prune, dying by SIGKILL just before the `fatal`th change to the filesystem."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        changes = arguments[2] & (os.O_WRONLY | os.O_RDWR) if event == "open" else event in CHANGES
        if changes:
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    with DirectIO(requests=1) as io:
        sys.addaudithook(count)
        save(run_dir, 20, io)
        prune(run_dir, keep_last=1)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory where fsync costs nothing: a kill loses no page that the kernel has, so the disk plays no part."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_a_kill_at_any_file_boundary_leaves_a_checkpoint_to_resume_from(memory_path: Path, io: DirectIO) -> None:
    save(memory_path / "start", 10, io)
    fatal, published, killed = 0, 0, True
    while killed:
        run_dir = memory_path / f"run-{fatal}"
        shutil.copytree(memory_path / "start", run_dir)
        child = os.fork()
        if child == 0:
            try:
                _save_until_event(run_dir, fatal)
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        path, skipped = newest_complete(run_dir)
        assert path is not None and path.name in ("step-000010", "step-000020"), fatal
        assert verify(path, deep=True, threads=1) == []
        assert all(skip.path.suffix == ".partial" for skip in skipped)
        published += path.name == "step-000020"
        if fatal % 8 == 0:  # what is left never stops the next attempt
            save(run_dir, 20, io)
            prune(run_dir, keep_last=1)
            assert names(run_dir) == ["step-000020"]
        shutil.rmtree(run_dir)
        fatal += 1
    assert fatal > 60 and published > 10, (fatal, published)
