"""Small files and directories that must be whole after a crash: private modes, fsync, atomic replacement."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_directory(path: Path) -> None:
    """Create `path` and missing parents, readable by the owner alone; an existing directory is left as it is."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that comes of a descriptor the path of its file: the system does not know it any more."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a new or replaced file of mode 0600 and fsync it. Not atomic: for files that a manifest will vouch for."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with naming(path), os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Publish `content` as `path` so that a crash leaves the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    write_file(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Let the caller fill a directory that appears under its name whole or not at all.

    Args:
        path: Absolute; must not exist, or be an empty directory. Missing parents are created.

    Yields:
        The directory to fill; its files are the caller's to sync. An exception inside removes it.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent))
    try:
        with naming(path):
            yield partial
        sync_directory(partial)
        partial.rename(path)
        for changed in (path.parent, *(made.parent for made in missing)):
            sync_directory(changed)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a file's own fsync does not cover its name."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Fsync an existing file or directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
