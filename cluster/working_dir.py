"""What a job takes along: the checkout without what is ignored, looked at before Ray packs it.

Ray packs without a look at sizes, and ends in a traceback or never where it meets what it cannot read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
"""Never part of a job: history, environments, caches, and what runs write. Ray adds what `.gitignore` files say."""

LIMIT_BYTES = 100 << 20
"""A checkout has a few MiB. Ray's dashboard takes no more, which it says as `status code 413` when all is packed."""

_ENTRY_BYTES = 78
"""Of a file or an empty folder in a zip archive, beside its content and twice its name; nothing is compressed."""

_END_BYTES = 22
"""Of a zip archive beside its entries."""

_DEEPEST = 200
"""Folders in folders; Ray's walk is recursive, and Python's patience with that ends at some hundreds."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TakenFile:
    """A file that Ray packs, or an empty directory."""

    path: Path
    """Below the working directory."""
    num_bytes: int


def check(directory: Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Return the bytes that a job started in `directory` takes along.

    Raises:
        ClusterRefusedError: They are more than `limit_bytes`, and the largest files are named; or Ray cannot pack what
            is there.
        OSError: Something cannot be read.
    """
    if not directory.is_dir():
        raise ClusterRefusedError(f"working directory {directory} is not a directory")
    files = list(taken(directory))
    total = sum(file.num_bytes for file in files)
    entries = sum(_ENTRY_BYTES + 2 * len(os.fsencode(file.path)) for file in files)
    if total + entries + _END_BYTES >= limit_bytes:
        files.sort(key=lambda file: file.num_bytes, reverse=True)
        shown = "\n".join(f"  {file.num_bytes / (1 << 20):10.1f} MiB  {file.path}" for file in files[:_SHOWN])
        raise ClusterRefusedError(
            f"a job would take {len(files)} files of {total >> 20} MiB along from {directory}, the limit is "
            f"{limit_bytes >> 20} MiB; keep data and checkpoints elsewhere, or list them in .gitignore. "
            f"The largest:\n{shown}"
        )
    return total


def taken(directory: Path) -> Iterator[TakenFile]:
    """What Ray packs of a directory: as its `_dir_travel` finds it (2.60), through links.

    Raises:
        ClusterRefusedError: Ray cannot pack what is there.
        OSError: Something cannot be read.
    """
    ignore_files = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":
        del ignore_files[0]
    yield from _Walk(directory, ignore_files).of(directory, [_Rules(directory, EXCLUDES)], ())


class _Rules:
    """Patterns in the form of `.gitignore` files, of what is left out below a folder."""

    def __init__(self, folder: Path, lines: Iterable[str]) -> None:
        from ray._private.thirdparty.pathspec.pathspec import PathSpec  # Ray's own copy: its answers count

        self._folder = folder
        self._matches: Callable[[str], bool] = PathSpec.from_lines("gitwildmatch", lines).match_file  # type: ignore[no-untyped-call]

    def leave_out(self, path: Path) -> bool:
        return self._matches(str(path.relative_to(self._folder)))


@dataclass(frozen=True, slots=True)
class _Walk:
    root: Path
    ignore_files: list[str]

    def of(self, path: Path, rules: list[_Rules], above: tuple[tuple[int, int], ...]) -> Iterator[TakenFile]:
        """Files at and below `path`; `above` are device and inode of the folders that it lies in."""
        try:
            found = path.stat()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return  # a link to nothing is not packed
            raise
        if is_folder := stat.S_ISDIR(found.st_mode):
            rules = [*rules, *self._rules_in(path)]
        if any(rule.leave_out(path) for rule in rules):
            return
        relative = path.relative_to(self.root)
        _require_packable(relative, found)
        if stat.S_ISREG(found.st_mode):
            yield TakenFile(relative, found.st_size)
        if not is_folder:
            return
        identity = (found.st_dev, found.st_ino)
        if identity in above or len(above) > _DEEPEST:
            raise ClusterRefusedError(
                f"{relative} in the working directory leads back to a folder that it lies in, or lies in more than "
                f"{_DEEPEST} others: Ray would follow it without end; list it in .gitignore"
            )
        entries = sorted(path.iterdir())
        if not entries:
            yield TakenFile(relative, 0)
        for entry in entries:
            yield from self.of(entry, rules, (*above, identity))

    def _rules_in(self, folder: Path) -> Iterator[_Rules]:
        for path in (folder / name for name in self.ignore_files):
            if path.is_file():
                try:
                    # In the encoding of the locale, as Ray will.
                    yield _Rules(folder, path.read_text().splitlines())
                except ValueError as error:
                    raise ClusterRefusedError(
                        f"{path.relative_to(self.root)} in the working directory is nothing that Ray can read: "
                        f"{error}; save it as UTF-8"
                    ) from error


def _require_packable(path: Path, found: os.stat_result) -> None:
    if stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise ClusterRefusedError(
            f"{path} in the working directory is a pipe or a device, which Ray would read for ever; list it in "
            ".gitignore, or keep it elsewhere"
        )
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ClusterRefusedError(
            f"{str(path)!r} in the working directory has a name that is not UTF-8, which Ray cannot pack; rename it"
        ) from error
