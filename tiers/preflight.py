"""Check a directory with a real write and read before anything long begins: recipe validation and actors call it."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tiers.direct_file import DirectMode, fault, lock_file
from tiers.errors import ShardError
from tiers.layout import PAGE_BYTES

logger = logging.getLogger(__name__)


def preflight(directory: Path, required_bytes: int = 0) -> DirectMode:
    """Return how files of `directory` will be opened, after a page has gone to disk and come back.

    Args:
        directory: An existing directory of the user.
        required_bytes: What will be written there.

    Returns:
        DIRECT, or BUFFERED with a logged warning where the filesystem refuses O_DIRECT (ramfs, some network drives).

    Raises:
        ShardError: It is missing, not a directory, not writable, too full, without file locks, or returns other bytes
            than were written.
    """
    try:
        status = directory.stat()
    except FileNotFoundError:
        raise ShardError(f"{directory} does not exist; create it, or name another directory in the recipe") from None
    except OSError as error:
        raise fault("test write", directory, error, 0, PAGE_BYTES) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ShardError(f"{directory} is not a directory; name another one in the recipe")
    check_free_bytes(directory, required_bytes)
    try:
        _write_and_read(directory, DirectMode.DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise fault("test write", directory, error, 0, PAGE_BYTES) from error
    else:
        return DirectMode.DIRECT
    try:
        _write_and_read(directory, DirectMode.BUFFERED)
    except OSError as error:
        raise fault("test write", directory, error, 0, PAGE_BYTES) from error
    logger.warning(
        "%s refuses O_DIRECT: its files go through the page cache, slower and with a second copy in memory", directory
    )
    return DirectMode.BUFFERED


def read_mode(file: Path) -> DirectMode:
    """How to read files beside an existing `file`: found with a real read, for places that may be read-only.

    Raises:
        ShardError: The file cannot be read at all.
    """
    for mode in DirectMode:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | mode.flag)
            try:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if mode is DirectMode.DIRECT and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                logger.warning("%s refuses O_DIRECT: it is read through the page cache", file.parent)
                continue
            raise fault("test read", file, error, 0, PAGE_BYTES) from error
        break
    return mode


def nearest_existing(path: Path) -> Path:
    """`path`, or the closest of its parents that exists: the filesystem that will hold it is that one's."""
    return next(each for each in (path, *path.parents) if each.exists())


def check_free_bytes(directory: Path, required_bytes: int) -> None:
    """Raise ShardError where `directory` has less than `required_bytes` free for this user."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < required_bytes:
        raise ShardError(
            f"{directory} needs {required_bytes:,} bytes and has {free_bytes:,} free; "
            "free space there, or name another directory"
        )


def _write_and_read(directory: Path, mode: DirectMode) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".preflight-", dir=directory)
    os.close(descriptor)
    path = Path(name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | mode.flag)
        try:
            lock_file(descriptor, fcntl.LOCK_EX, path)
            with mmap.mmap(-1, PAGE_BYTES) as sent, mmap.mmap(-1, PAGE_BYTES) as received:
                sent[:] = os.urandom(PAGE_BYTES)
                os.pwritev(descriptor, [sent], 0)
                os.fsync(descriptor)
                os.preadv(descriptor, [received], 0)
                if sent[:] != received[:]:
                    raise ShardError(f"{directory} returned other bytes than were written; do not use this drive")
        finally:
            os.close(descriptor)
    finally:
        path.unlink()
