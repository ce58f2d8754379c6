"""A filesystem so small that a test can fill it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_filesystem(path: Path, mebibytes: int) -> Iterator[Path]:
    """Mount one at a new directory, and skip the test where that is not allowed."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m"]
    mounted = subprocess.run(["mount", *options, "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a filesystem cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
