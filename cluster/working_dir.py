"""What a job takes along: the checkout without what is ignored, checked for its size before Ray packs it."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.errors import ClusterRefusedError

EXCLUDES = (
    ".git",
    ".venv",
    "venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".numba_cache",
    "runs",
    "checkpoints",
    "*.safetensors",
    "*.egg-info",
)
"""Never part of a job: history, environments, caches, and what runs write."""

LIMIT_BYTES = 100 << 20
"""A checkout has a few MiB. Ray itself takes up to 512 MiB, packs them on every change, and fails without a size."""

_SHOWN = 5


def excludes(directory: Path) -> list[str]:
    """Patterns of what stays here: EXCLUDES and the directory's own `.gitignore`."""
    try:
        lines = (directory / ".gitignore").read_text().splitlines()
    except OSError:
        lines = []
    stripped = [line.strip() for line in lines]
    return [*EXCLUDES, *(line for line in stripped if line and not line.startswith("#"))]


def check(directory: Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Return the bytes that a job started in `directory` takes along.

    Raises:
        ClusterRefusedError: They are more than `limit_bytes`; the largest files are named.
    """
    if not directory.is_dir():
        raise ClusterRefusedError(f"working directory {directory} is not a directory")
    sizes = {path: path.lstat().st_size for path in _files(directory, excludes(directory))}
    total = sum(sizes.values())
    if total > limit_bytes:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:_SHOWN]
        shown = "\n".join(f"  {sizes[path] / (1 << 20):10.1f} MiB  {path.relative_to(directory)}" for path in largest)
        raise ClusterRefusedError(
            f"a job would take {len(sizes)} files of {total >> 20} MiB along from {directory}, the limit is "
            f"{limit_bytes >> 20} MiB; keep data and checkpoints elsewhere, or list them in .gitignore. "
            f"The largest:\n{shown}"
        )
    return total


def _files(directory: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        place = Path(folder)
        folders[:] = [name for name in folders if not _matches(place / name, directory, patterns)]
        yield from (place / name for name in files if not _matches(place / name, directory, patterns))


def _matches(path: Path, directory: Path, patterns: Sequence[str]) -> bool:
    """Whether a pattern excludes `path`: by name anywhere, or by path where the pattern has a slash inside it.

    The forms of `.gitignore` that this checkout uses. A `!` pattern never matches: the size is then too large, not
    too small.
    """
    relative = path.relative_to(directory).as_posix()
    for pattern in patterns:
        plain = pattern.rstrip("/")
        target = relative if "/" in plain else path.name
        if fnmatch.fnmatchcase(target, plain.lstrip("/")):
            return True
    return False
