"""Names the files below folders and those that match a glob, all of them: what cannot be looked at is an error.

`os.walk` and `glob` pass over it without a word, and a run would train on the rest. Links to folders are followed, each
folder is entered once. Names that begin with a dot are left out, and `lost+found`, which only root can read.
"""

from __future__ import annotations

import glob
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.recipe.checks import searched_from
from tasks.data.settings import DataError

_PASSED_OVER = "lost+found"

Identity = tuple[int, int]
"""Device and inode."""


class FileTree:
    """The file system without some folders."""

    def __init__(self, left_out: Iterable[Path] = ()) -> None:
        """Leave out folders and all that is below them; they need not exist."""
        found = (status_of(path) for path in left_out)
        self._left_out = {_identity(status) for status in found if status is not None}

    def below(self, folders: Iterable[Path]) -> Iterator[Path]:
        """Everything below folders that is no folder itself: files, and whatever else has a name there.

        Raises:
            DataError: A folder cannot be read, or a link leads nowhere.
        """
        for _, paths in self._walk(folders):
            yield from paths

    def matches(self, pattern: Path) -> Iterator[Path]:
        """Files, folders and whatever else match a glob, in which `**` stands for any number of folders.

        Raises:
            DataError: A folder cannot be read, or a link leads nowhere.
        """
        base = searched_from(pattern)
        yield from self._matches(base, pattern.relative_to(base).parts)

    def _walk(self, folders: Iterable[Path]) -> Iterator[tuple[Path, list[Path]]]:
        """Yield every folder with what it holds besides folders. Links come last: a folder keeps its own name."""
        visited = set(self._left_out)
        pending, links = deque[Path](), deque[Path]()
        for folder in folders:
            (links if folder.is_symlink() else pending).append(folder)
        while pending or links:
            folder = pending.popleft() if pending else links.popleft()
            status = status_of(folder)
            if status is None or (identity := _identity(status)) in visited:
                continue
            visited.add(identity)
            others = []
            for entry in _entries(folder):
                if not _is_folder(entry):
                    others.append(Path(entry.path))
                else:
                    (links if entry.is_symlink() else pending).append(Path(entry.path))
            yield folder, others

    def _matches(self, place: Path, parts: tuple[str, ...]) -> Iterator[Path]:
        status = status_of(place)
        is_folder = status is not None and stat.S_ISDIR(status.st_mode)
        if status is not None and is_folder and _identity(status) in self._left_out:
            return
        if not parts:
            yield place
            return
        if not is_folder:
            return
        part, rest = parts[0], parts[1:]
        if part == "**":
            for folder, others in self._walk([place]):
                yield from self._matches(folder, rest) if rest else others
        elif not glob.has_magic(part):
            if _exists(place / part):
                yield from self._matches(place / part, rest)
        else:
            for entry in _entries(place, hidden=part.startswith(".")):
                if fnmatchcase(entry.name, part) and (not rest or _is_folder(entry)):
                    yield from self._matches(Path(entry.path), rest)


def status_of(path: Path) -> os.stat_result | None:
    """What a path leads to; None where nothing has that name.

    Raises:
        DataError: It is a link to nothing, perhaps to a disk that is not mounted, or cannot be looked at.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DataError(f"{path} is a link to {path.readlink()}, which does not exist; mend or remove it") from None
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _entries(folder: Path, *, hidden: bool = False) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error
    return sorted((entry for entry in found if entry.name != _PASSED_OVER), key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return entry.is_dir()
    status = status_of(Path(entry.path))
    return status is not None and stat.S_ISDIR(status.st_mode)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}; change its mode or what it links to, or move it away")
