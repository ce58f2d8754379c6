"""Full and damaged disks: the run ends with a message, the older checkpoint stays whole and is gone on from."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.json_lines import JsonLines
from support.kills import EVERY, STEPS, assert_same_state, running
from support.small_disk import small_filesystem
from tests.support.stores import random_arrays, saved_facts, small_model, write_layer
from tiers import checkpoint
from tiers.checkpoint import newest_complete
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError, ShardError
from tiers.layout import Buffer, Precision
from tiers.manifest import verify
from tiers.preflight import preflight
from tiers.scratch import SCRATCH_NAME
from tiers.shard_store import ShardStore
from tiers.shards import FileRecord

MIB = 1 << 20
MODEL = small_model(Precision.FP32, rows=500)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    with small_filesystem(tmp_path / "disk", 8) as path:
        yield path


def write_all(directory: Path) -> list[FileRecord]:
    with DirectIO(requests=1) as io:
        store = ShardStore(directory, MODEL, io, preflight(directory))
        return [
            record for layer in MODEL.layers for record in write_layer(store, layer, random_arrays(MODEL, layer, 1))
        ]


def leave_free(path: Path, num_bytes: int) -> Path:
    ballast = path / "ballast"
    ballast.unlink(missing_ok=True)
    free = os.statvfs(path)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - num_bytes)
    return ballast


@pytest.mark.filterwarnings("ignore")
def test_a_disk_that_fills_before_or_during_a_checkpoint_leaves_the_older_one(small_disk: Path) -> None:
    writer = checkpoint.begin(small_disk, 1, MODEL)
    older = writer.publish(write_all(writer.directory), saved_facts(MODEL, 1))
    writer = checkpoint.begin(small_disk, 2, MODEL)
    leave_free(small_disk, 1 * MIB)
    with pytest.raises(ShardError, match=r"ENOSPC.*free space on this filesystem"):
        write_all(writer.directory)
    writer.discard()
    leave_free(small_disk, 1 * MIB)
    with pytest.raises(CheckpointError, match=r"cannot begin the checkpoint of step 3.*free"):
        checkpoint.begin(small_disk, 3, MODEL)
    assert newest_complete(small_disk)[0] == older and verify(older, deep=True) == []


def test_a_row_that_a_full_disk_refuses_names_the_file_and_is_dropped_at_the_next_start(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    with JsonLines(path, 0) as lines:
        lines.append({"step": 1})
        ballast = leave_free(small_disk, 0)
        with pytest.raises(OSError, match=r"metrics.jsonl") as raised:
            for step in range(2, 2000):
                lines.append({"step": step, "text": "x" * 100})
        assert raised.value.errno == errno.ENOSPC
    ballast.unlink()
    with JsonLines(path, 1) as lines:
        lines.append({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_run_whose_disk_is_full_fails_and_goes_on_once_there_is_room(
    recipe: Path, undisturbed: Path, small_disk: Path, tmp_path: Path
) -> None:
    run_dir = small_disk / "run"
    with running(recipe, run_dir, log=tmp_path / "log") as run:
        assert run.finish() == 2
        assert "has no room for the run's checkpoints: at most 3 at a time" in run.output()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    with running(recipe, run_dir, log=tmp_path / "log") as run:
        run.wait_for(lambda: newest_complete(run_dir)[0] is not None, "a checkpoint")
        os.kill(run.process.pid, signal.SIGSTOP)  # which begins checkpoints
        ballast = leave_free(small_disk, MIB)
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.finish() == 1
        assert re.search("train: failed: (cannot begin the checkpoint of step|.*ENOSPC)", run.output()), run.output()
    newest, _ = newest_complete(run_dir)
    assert newest is not None and verify(newest, deep=True) == []
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with running(recipe, run_dir, log=tmp_path / "log") as run:
        assert run.finish() == 2
        assert "Read-only file system" in run.output()
    subprocess.run(["mount", "-o", "remount,rw,size=64m", small_disk], check=True)
    with running(recipe, run_dir, log=tmp_path / "log") as run:
        assert run.finish() == 0, run.output()
    assert_same_state(run_dir / "checkpoints" / f"step-{STEPS:06}", undisturbed / "checkpoints" / f"step-{STEPS:06}")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_working_shard_truncated_in_a_step_ends_the_run_by_name_and_the_checkpoint_goes_on(
    recipe: Path, undisturbed: Path
) -> None:
    run_dir = recipe.parent / "truncated"
    scratch = recipe.parent / "nvme" / SCRATCH_NAME
    with running(recipe, run_dir) as run:
        run.wait_for(lambda: newest_complete(run_dir)[0] is not None, "a checkpoint")
        while run.process.poll() is None:  # again and again: a store between two makes it whole
            with suppress(FileNotFoundError):  # its directory goes with the run
                for shard in scratch.glob(f"*/{Buffer.EXP_AVG}/c/0"):
                    os.truncate(shard, 4096)
        assert run.finish() == 1
        said = re.search(r"^train: failed: load_state\[\d+\] of .* failed in the prefetcher: (.*)$", run.output(), re.M)
        assert said is not None and str(scratch) in said[1], run.output()
        assert "Traceback" not in run.output()
    with running(recipe, run_dir) as run:
        assert run.finish() == 0, run.output()
    assert_same_state(run_dir / "checkpoints" / f"step-{STEPS:06}", undisturbed / "checkpoints" / f"step-{STEPS:06}")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_older_one_gone_on_from(
    recipe: Path, undisturbed: Path
) -> None:
    run_dir = recipe.parent / "damaged"
    with running(recipe, run_dir, "checkpoint.keep_last=4") as run:
        assert run.finish() == 0, run.output()
    damaged, older = (run_dir / "checkpoints" / f"step-{step:06}" for step in (STEPS, STEPS - EVERY))
    shard = next(damaged.glob(f"*/{Buffer.EXP_AVG}/c/0"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    # Without a step more there is nothing to restore for: an export would find the damage.
    with running(recipe, run_dir, f"train.steps={STEPS + 1}", 'run.accept_changes=["train.steps"]') as run:
        assert run.finish() == 1
        assert f"{damaged} is not resumed from" in run.output() and "another crc32c" in run.output()
        assert f'run.resume = "{older}"' in run.output()
    with running(recipe, run_dir, f"run.resume={older}") as run:
        assert run.finish() == 0, run.output()
        assert f"a later checkpoint is now {damaged}.aside-0" in run.output()
    assert_same_state(damaged, undisturbed / "checkpoints" / damaged.name)
    assert damaged.with_name(f"{damaged.name}.aside-0").is_dir()
