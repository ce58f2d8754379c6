"""What the system refuses of an open file is told with the file's path, which it does not know any more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.json_lines import JsonLines
from support.stores import empty_arrays, small_model, write_layer
from tiers.direct_file import DirectMode, preallocate, reading, writing
from tiers.direct_io import DirectIO
from tiers.errors import ShardError
from tiers.layout import Precision
from tiers.preflight import preflight
from tiers.safetensors_directory import _read_index
from tiers.safetensors_header import read_header
from tiers.safetensors_source import _read_blocks
from tiers.scratch import LOCK_NAME, Scratch, abandoned_bytes
from tiers.shard_store import ShardStore

Refuse = Callable[[str, int], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Makes a system call fail with an errno, for no disk fails at will."""

    def patch(call: str, number: int) -> None:
        def fail(*arguments: object, **named: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(call, fail)

    yield patch
    monkeypatch.undo()


def test_a_drive_that_fails_while_a_model_is_imported(tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(8, np.float32)}, path)
    (tensor,) = read_header(path)
    refuse("os.preadv", errno.EIO)
    with pytest.raises(ShardError, match=rf"read of 32 bytes at \d+ of {path} failed: \[EIO 5\].*drive"):
        next(_read_blocks(tensor))
    path.unlink()
    with pytest.raises(ShardError, match=rf"open of {path} failed: \[ENOENT 2\]"):
        next(_read_blocks(tensor))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_refused_before_a_run_and_still_read(
    tmp_path: Path, refuse: Refuse, number: int
) -> None:
    path = tmp_path / "f"
    preallocate(path, 4096)
    refuse("fcntl.flock", number)
    with pytest.raises(ShardError, match=rf"lock of {tmp_path}/.*failed: \[E.* {number}\].*filesystem with locks"):
        preflight(tmp_path)
    with pytest.raises(ShardError, match=f"lock of {path} failed"), writing(path, DirectMode.BUFFERED):
        pass
    with reading(path, DirectMode.BUFFERED) as descriptor:
        assert os.pread(descriptor, 1, 0) == b"\0"
    with pytest.raises(ShardError, match=rf"cannot lock the NVMe directory.*{LOCK_NAME}"):
        Scratch(tmp_path)
    assert abandoned_bytes(tmp_path) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"f", LOCK_NAME}


def test_a_lock_that_fails_otherwise_is_no_leave_to_read(tmp_path: Path, refuse: Refuse) -> None:
    preallocate(tmp_path / "f", 4096)
    refuse("fcntl.flock", errno.EIO)
    with pytest.raises(ShardError, match=r"lock of .*EIO"), reading(tmp_path / "f", DirectMode.BUFFERED):
        pass


def test_no_file_is_made_where_none_can_be_opened(tmp_path: Path, refuse: Refuse) -> None:
    refuse("os.open", errno.EMFILE)
    with pytest.raises(ShardError, match=rf"allocate of 4096 bytes at 0 of {tmp_path}/f failed: \[EMFILE 24\].*ulimit"):
        preallocate(tmp_path / "f", 4096)


def test_a_full_disk_takes_no_lock_and_nothing_is_left_of_the_scratch(tmp_path: Path, refuse: Refuse) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    refuse("os.pwrite", errno.ENOSPC)
    with pytest.raises(ShardError, match=rf"cannot prepare .*No space left.*{tmp_path / LOCK_NAME}"):
        Scratch(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_NAME]


def test_a_shard_whose_size_or_index_cannot_be_read(tmp_path: Path, refuse: Refuse) -> None:
    model = small_model(Precision.FP32)
    layer = model.layers[1]
    with DirectIO(requests=1) as io:
        store = ShardStore(tmp_path, model, io, DirectMode.BUFFERED)
        records = {each.path: each for each in write_layer(store, layer, empty_arrays(model, layer))}
        refuse("os.pread", errno.EIO)
        with pytest.raises(
            ShardError, match=rf"read of \d+ bytes at 0 of {tmp_path}/{layer.name}/.* failed: \[EIO 5\]"
        ):
            store.read(layer, empty_arrays(model, layer), records)


@pytest.mark.parametrize("read", [read_header, _read_index, partial(JsonLines, resumed_step=1)])
def test_a_file_that_opens_and_cannot_be_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.symlink_to("/proc/self/mem")  # whose first page nobody has mapped: EIO
    with pytest.raises(OSError, match=str(path)):
        read(path)


def test_rows_that_do_not_reach_the_disk(tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonLines(path, 0) as lines:
        lines.append({"step": 1})
        refuse("os.fsync", errno.EIO)
        with pytest.raises(OSError, match=str(path)):
            lines.sync()
