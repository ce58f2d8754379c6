"""One file opened for O_DIRECT: locked, read and written in blocks, with faults that name path, place and errno."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from tiers.checksum import ByteArray, crc32c
from tiers.durable_files import FILE_MODE, naming
from tiers.errors import ShardError
from tiers.layout import PAGE_BYTES

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `flock` says on a filesystem without locks (some network and FUSE mounts)."""


class DirectMode(StrEnum):
    """How the files of a directory are opened."""

    DIRECT = "direct"
    BUFFERED = "buffered"
    """The filesystem knows no O_DIRECT: bytes go through the page cache."""

    @property
    def flag(self) -> int:
        """What it adds to the flags of `open`."""
        return os.O_DIRECT if self is DirectMode.DIRECT else 0


def read_block(descriptor: int, path: Path, memory: ByteArray, offset: int) -> int:
    """Fill `memory` from a file offset and return its crc32c. Raises ShardError naming path, place and errno."""
    done = 0
    while done < memory.size:
        try:
            got = os.preadv(descriptor, [memory[done:].data], offset + done)
        except OSError as error:
            raise fault("read", path, error, offset, memory.size) from error
        done += got
        # O_DIRECT cannot go on from the middle of a page, and stops there only at the end of the file.
        if got == 0 or done % PAGE_BYTES:
            raise ShardError(
                f"{path} is truncated: read {memory.size} bytes at {offset}, got {done}; "
                "restore it from an earlier checkpoint"
            )
    return crc32c(memory)


def write_block(descriptor: int, path: Path, memory: ByteArray, offset: int) -> int:
    """Write `memory` at a file offset and return its crc32c. Raises ShardError naming path, place and errno."""
    crc, done = crc32c(memory), 0
    while done < memory.size:
        try:
            put = os.pwritev(descriptor, [memory[done:].data], offset + done)
        except OSError as error:
            raise fault("write", path, error, offset, memory.size) from error
        done += put
        if put == 0 or done % PAGE_BYTES:
            raise ShardError(f"short write to {path}: {memory.size} bytes at {offset}, {done} went; is the disk full?")
    return crc


def preallocate(path: Path, num_bytes: int) -> None:
    """Make `path` a private file of exactly `num_bytes` with its blocks reserved, so that a full disk shows here.

    Raises:
        ShardError: Naming path and errno; the file is removed again.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise fault("allocate", path, error, 0, num_bytes) from error
    try:
        os.ftruncate(descriptor, min(num_bytes, os.fstat(descriptor).st_size))
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise fault("allocate", path, error, 0, num_bytes) from error
    finally:
        os.close(descriptor)


def fault(verb: str, path: Path, error: OSError, offset: int, num_bytes: int) -> ShardError:
    """The ShardError for a failed system call: what was attempted, where, and what to do about it."""
    name = errno.errorcode.get(error.errno or 0, "?")
    advice = {
        errno.ENOSPC: "; free space on this filesystem, or keep fewer checkpoints",
        errno.EDQUOT: "; the disk quota is used up: raise it, or keep fewer checkpoints",
        errno.EFBIG: "; the file size limit (ulimit -f) is too low",
        errno.ENOENT: "; the file is missing",
        errno.EACCES: "; the path is not permitted: change its owner or mode, or choose another directory",
        errno.EIO: "; look at the drive, and at what the kernel says of it (dmesg)",
        errno.EMFILE: "; the limit of open files (ulimit -n) is too low",
        **dict.fromkeys(NO_LOCKS if verb == "lock" else (), "; name a directory on a filesystem with locks (flock)"),
    }.get(error.errno or 0, "")
    what = f"{num_bytes} bytes at {offset} of {path}" if num_bytes else path
    return ShardError(f"{verb} of {what} failed: [{name} {error.errno}] {error.strerror}{advice}")


@contextmanager
def reading(path: Path, mode: DirectMode) -> Iterator[int]:
    """Open an existing file to read, beside other readers; yields the descriptor."""
    with _opened(path, os.O_RDONLY | mode.flag, fcntl.LOCK_SH) as descriptor:
        yield descriptor


@contextmanager
def writing(path: Path, mode: DirectMode) -> Iterator[int]:
    """Open an existing file as its only writer; yields the descriptor."""
    with _opened(path, os.O_WRONLY | mode.flag, fcntl.LOCK_EX) as descriptor:
        yield descriptor


@contextmanager
def _opened(path: Path, flags: int, lock: int) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise fault("open", path, error, 0, 0) from error
    try:
        lock_file(descriptor, lock, path)
        yield descriptor
    finally:
        with naming(path):
            os.close(descriptor)


def lock_file(descriptor: int, lock: int, path: Path) -> None:
    """Keep to one writer a shard, and no reader beside it, in all processes: notices where the graph slipped.

    A reader goes without where the filesystem has no locks: no writer of ours is let in there.

    Raises:
        ShardError: Another process has the file, or the filesystem has no locks and the file is to be written.
    """
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShardError(
            f"{path} is in use: one writer a shard, and no reader while it writes; order the two operations"
        ) from None
    except OSError as error:
        if lock == fcntl.LOCK_EX or error.errno not in NO_LOCKS:
            raise fault("lock", path, error, 0, 0) from error


def sync_descriptor(descriptor: int, path: Path) -> int:
    """Fsync, so that what was written outlives a crash. Returns 0, as a step among others that return checksums."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise fault("fsync", path, error, 0, 0) from error
    return 0
