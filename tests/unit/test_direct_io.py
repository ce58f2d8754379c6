"""O_DIRECT primitives: bytes and checksums round trip, and every fault of a disk surfaces with path and errno."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiers.bounce_blocks import BounceBlocks
from tiers.checksum import ByteArray, crc32c, joined_crc32c
from tiers.direct_file import DirectMode, preallocate, writing
from tiers.direct_io import MOST_BOUNCE_BLOCKS, DirectIO, FileBlocks
from tiers.errors import ShardError
from tiers.io_threads import IoThreads
from tiers.preflight import preflight

MIB = 1 << 20


def pages(num_bytes: int, seed: int = 0) -> ByteArray:
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return memory


def blocks(path: Path, memory: ByteArray, block: int, mode: DirectMode = DirectMode.DIRECT) -> FileBlocks:
    return FileBlocks(path, mode, memory, range(0, memory.size, block), block)


@pytest.fixture
def io() -> Iterator[DirectIO]:
    with DirectIO(requests=3) as opened:
        yield opened


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A place to mount a filesystem on, unmounted afterwards."""
    place = tmp_path / "mounted"
    place.mkdir()
    yield place
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


def mount(kind: str, options: str, place: Path) -> None:
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(place)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"may not mount {kind}")


@pytest.mark.parametrize("mode", list(DirectMode))
def test_bytes_and_checksums_round_trip(tmp_path: Path, io: DirectIO, mode: DirectMode) -> None:
    sent, received, path = pages(MIB + 4096), pages(MIB + 4096, seed=1), tmp_path / "f"
    preallocate(path, sent.size)
    (written,) = io.write([blocks(path, sent, 65536, mode)], sync=True)
    (read,) = io.read([blocks(path, received, 65536, mode)])
    assert np.array_equal(sent, received)
    assert written == read == io.scan(path, mode, sent.size, 65536)
    assert path.read_bytes() == sent.tobytes() and path.stat().st_mode & 0o777 == 0o600


def test_copy_equals_its_source(tmp_path: Path, io: DirectIO) -> None:
    sent, source, target = pages(MIB), tmp_path / "a", tmp_path / "b"
    for path in (source, target):
        preallocate(path, sent.size)
    (sums,) = io.write([blocks(source, sent, 131072)], sync=False)
    assert io.copy(source, DirectMode.DIRECT, target, DirectMode.BUFFERED, sent.size, 131072) == sums
    assert target.read_bytes() == sent.tobytes()


def test_checksums_of_pieces_join_to_that_of_the_whole() -> None:
    data = np.random.default_rng(3).integers(0, 256, 100_003, dtype=np.uint8)
    pieces = np.split(data, [0, 1, 4097, 70_000])
    assert joined_crc32c((crc32c(piece), piece.size) for piece in pieces) == crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720


def test_a_truncated_file_is_an_error_with_its_path(tmp_path: Path, io: DirectIO) -> None:
    memory, path = pages(MIB), tmp_path / "f"
    preallocate(path, memory.size)
    for num_bytes in (0, 100, 65536, memory.size - 1):
        os.truncate(path, num_bytes)
        with pytest.raises(ShardError, match=rf"{path} is truncated"):
            io.read([blocks(path, memory, 65536)])


def test_a_missing_file_is_an_error_with_its_path_and_errno(tmp_path: Path, io: DirectIO) -> None:
    with pytest.raises(ShardError, match=rf"{tmp_path}/none failed: \[ENOENT 2\]") as caught:
        io.read([blocks(tmp_path / "none", pages(4096), 4096)])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_full_disk_shows_when_the_file_is_made(mounted: Path) -> None:
    mount("tmpfs", "size=1m", mounted)
    with pytest.raises(ShardError, match=rf"allocate of 2097152 bytes at 0 of {mounted}/f failed: \[ENOSPC 28\]"):
        preallocate(mounted / "f", 2 * MIB)
    assert not list(mounted.iterdir())


def test_a_disk_that_fills_during_a_write_is_an_error_at_once(mounted: Path, io: DirectIO) -> None:
    mount("tmpfs", "size=1m", mounted)
    path = mounted / "sparse"
    path.touch()
    os.truncate(path, 2 * MIB)  # no block is reserved
    with pytest.raises(ShardError, match=rf"{path}.*(ENOSPC 28|disk full)"):
        io.write([blocks(path, pages(2 * MIB), 65536, preflight(mounted))], sync=True)


def test_a_file_size_limit_names_path_and_errno(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(ShardError, match=rf"{tmp_path}/f failed: \[EFBIG 27\].*ulimit"):
            preallocate(tmp_path / "f", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_second_writer_or_a_reader_beside_one_is_refused(tmp_path: Path, io: DirectIO) -> None:
    memory, path = pages(8192), tmp_path / "f"
    preallocate(path, memory.size)
    with writing(path, DirectMode.DIRECT):
        with pytest.raises(ShardError, match="one writer a shard"):
            io.write([blocks(path, memory, 4096)], sync=False)
        with pytest.raises(ShardError, match="no reader while it writes"):
            io.read([blocks(path, memory, 4096)])
    io.read([blocks(path, memory, 4096)])


def test_preflight_finds_o_direct(tmp_path: Path) -> None:
    assert preflight(tmp_path, required_bytes=4096) is DirectMode.DIRECT
    assert not list(tmp_path.iterdir())


def test_a_filesystem_without_o_direct_is_used_buffered_with_a_warning(
    mounted: Path, io: DirectIO, caplog: pytest.LogCaptureFixture
) -> None:
    mount("ramfs", "mode=0700", mounted)
    mode = preflight(mounted)
    assert mode is DirectMode.BUFFERED and "refuses O_DIRECT" in caplog.text
    sent, received, path = pages(MIB), pages(MIB, seed=1), mounted / "f"
    preallocate(path, sent.size)
    assert io.write([blocks(path, sent, 65536, mode)], sync=True) == io.read([blocks(path, received, 65536, mode)])
    assert np.array_equal(sent, received)


def test_preflight_refuses_a_path_that_is_missing_a_file_or_too_full(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is not a directory")):
        with pytest.raises(ShardError, match=message):
            preflight(path)
    with pytest.raises(ShardError, match="needs 1,000,000,000,000,000,000 bytes and has"):
        preflight(tmp_path, required_bytes=10**18)


def test_preflight_refuses_a_read_only_filesystem(mounted: Path) -> None:
    mount("tmpfs", "size=1m,ro", mounted)
    with pytest.raises(ShardError, match=rf"test write.*{mounted} failed: \[EROFS 30\]"):
        preflight(mounted)


def test_preflight_refuses_a_directory_of_another_user(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to give a permission up")
    tmp_path.chmod(0o700)

    def attempt() -> None:
        ctypes.CDLL(None).setuid(65534)
        with pytest.raises(ShardError, match="EACCES 13"):
            preflight(tmp_path)

    child = multiprocessing.get_context("fork").Process(target=attempt)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_a_fork_is_told_to_open_its_own_threads(tmp_path: Path, io: DirectIO) -> None:
    memory, path = pages(4096), tmp_path / "f"
    preallocate(path, memory.size)
    io.write([blocks(path, memory, 4096)], sync=False)

    def attempt() -> None:
        with pytest.raises(ShardError, match="open a DirectIO there"):
            io.read([blocks(path, memory, 4096)])
        with DirectIO(requests=1) as own:
            own.read([blocks(path, memory, 4096)])

    child = multiprocessing.get_context("fork").Process(target=attempt)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_a_write_that_gets_no_thread_does_not_return_while_a_block_is_under_way(
    tmp_path: Path, io: DirectIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor would be closed, and the block land in whatever file is opened next."""
    memory, path = pages(4 * 4096), tmp_path / "f"
    preallocate(path, memory.size)
    refused, returned, left = threading.Event(), threading.Event(), list[bool]()
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if any(other.name.startswith("direct-io") for other in threading.enumerate()):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    @contextmanager
    def lend(number: int) -> Iterator[ByteArray]:
        assert refused.wait(60)
        left.append(returned.wait(0.3))
        yield memory[number * 4096 : (number + 1) * 4096]

    monkeypatch.setattr(threading.Thread, "start", start_one)
    try:
        with pytest.raises(ShardError, match=r"cannot start a thread.*can't start new thread.*prefetch_threads"):
            io.write([replace(blocks(path, memory, 4096), lend=lend)], sync=True)
    finally:
        returned.set()
    io.close()
    assert left == [False], "the second block, which no future tells of, must not begin"


def test_closing_waits_for_who_is_at_work_and_refuses_who_comes_later(tmp_path: Path) -> None:
    threads = IoThreads(1)
    closer = threading.Thread(target=threads.close)

    def steps() -> Iterator[Callable[[], int]]:
        yield lambda: 1
        closer.start()
        with pytest.raises(ShardError, match="have ended"):
            while closer.is_alive():
                with threads.in_use():
                    pass
        yield lambda: 2

    with threads.in_use():
        assert threads.run([steps()]) == [(1, 2)]
    closer.join(60)
    assert not closer.is_alive()


def test_blocks_that_copies_go_through_are_bounded_whatever_the_number_of_threads(tmp_path: Path) -> None:
    blocks_of_a_page = BounceBlocks(2, 4096)
    third = threading.Thread(target=lambda: blocks_of_a_page.lent().__enter__())
    with blocks_of_a_page.lent() as first:
        with blocks_of_a_page.lent() as second:
            assert first.ctypes.data != second.ctypes.data
            third.start()
            third.join(0.1)
            assert third.is_alive()
        third.join(60)
        assert not third.is_alive()
    with DirectIO(requests=64) as io:
        preallocate(tmp_path / "a", 64 * 4096)
        io.scan(tmp_path / "a", DirectMode.DIRECT, 64 * 4096, 4096)
        assert len(io._bounce._free) <= MOST_BOUNCE_BLOCKS
