"""Small files and directories that must be whole after a crash: private modes, fsync, atomic replacement."""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_directory(path: Path) -> None:
    """Create `path` and missing parents, readable by the owner alone; an existing directory is left as it is."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a new or replaced file of mode 0600 and fsync it. Not atomic: for files that a manifest will vouch for."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Publish `content` as `path` so that a crash leaves the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    write_file(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a file's own fsync does not cover its name."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Fsync an existing file or directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
