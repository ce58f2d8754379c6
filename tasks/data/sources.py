"""From paths, directories and globs to a sorted list of files, each with its format. Opens none of them."""

from __future__ import annotations

import glob
import stat
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from tasks.data.file_tree import FileTree, status_of
from tasks.data.settings import DataError, DataSettings

FileFormat = Literal["text", "jsonl", "parquet", "arrow"]

EXTENSIONS: dict[FileFormat, tuple[str, ...]] = {
    "text": (".txt", ".text", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
REFUSED_EXTENSIONS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".bin", ".npy", ".npz", ".pt", ".safetensors")
"""Never text: taking them for text would train on noise without a word."""

_KINDS = {
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
"""What has a name without being a file: reading it might never end."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file."""

    path: Path
    format: FileFormat
    num_bytes: int


def find_files(settings: DataSettings) -> tuple[SourceFile, ...]:
    """List the input files: paths in the order given, sorted by name within each, every file once.

    Raises:
        DataError: a path does not exist, matches nothing, cannot be read or is no regular file, or has a format that
            cannot be told.
    """
    tree = FileTree(settings.left_out)
    found: dict[Path, SourceFile] = {}
    for path in settings.paths:
        for file in _expand(path, settings, tree):
            source = _source_file(file, settings)
            found.setdefault(file.resolve(), source)
    return tuple(found.values())


def _expand(path: Path, settings: DataSettings, tree: FileTree) -> list[Path]:
    status = status_of(path)
    if status is None and glob.has_magic(str(path)):
        return _matching(path, settings, tree)
    if status is not None and stat.S_ISDIR(status.st_mode):
        return _files_below(path, settings, tree)
    return [path]


def _matching(pattern: Path, settings: DataSettings, tree: FileTree) -> list[Path]:
    """Files that match a glob, and the files of the formats below folders that do."""
    matches = sorted(tree.matches(pattern))
    folders = [path for path in matches if path.is_dir()]
    files = {path for path in matches if path not in set(folders)}
    patterns = _patterns(settings)
    files.update(path for path in tree.below(folders) if _is_named(path, patterns))
    if not files:
        raise DataError(f"{settings.key} {pattern} matches no file")
    return sorted(files)


def _files_below(directory: Path, settings: DataSettings, tree: FileTree) -> list[Path]:
    patterns = _patterns(settings)
    files: list[Path] = []
    seen_extensions: set[str] = set()
    for path in tree.below([directory]):
        if _is_named(path, patterns):
            files.append(path)
        else:
            seen_extensions.add(path.suffix or path.name)
    if not files:
        others = f"; it holds {', '.join(sorted(seen_extensions)[:8])}" if seen_extensions else "; it is empty"
        raise DataError(
            f"{settings.key} {directory} holds no file that matches {', '.join(patterns)}{others}. "
            'Name what to take with data.suffixes, e.g. ["*.py"]'
        )
    return sorted(files)


def _source_file(file: Path, settings: DataSettings) -> SourceFile:
    status = status_of(file)
    if status is None:
        raise DataError(f"{settings.key} {file} does not exist")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{settings.key} {file} is a {_KINDS.get(stat.S_IFMT(status.st_mode), 'special file')}; data are read from "
            "regular files: write what it gives to one, or move it away"
        )
    return SourceFile(file, _format_of(file, settings), status.st_size)


def _is_named(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name.lower(), pattern.lower()) for pattern in patterns)


def _patterns(settings: DataSettings) -> tuple[str, ...]:
    """Of the names of files to take from directories."""
    return settings.suffixes or tuple(f"*{extension}" for extension in _extensions(settings))


def _extensions(settings: DataSettings) -> tuple[str, ...]:
    if settings.format == "auto":
        return tuple(ext for extensions in EXTENSIONS.values() for ext in extensions)
    return EXTENSIONS[settings.format]


def _format_of(file: Path, settings: DataSettings) -> FileFormat:
    if settings.format != "auto":
        return settings.format
    extension = file.suffix.lower()
    for name, extensions in EXTENSIONS.items():
        if extension in extensions:
            return name
    if extension in REFUSED_EXTENSIONS:
        raise DataError(
            f"{file}: a {extension} file is neither text, JSONL, Parquet nor Arrow; "
            "unpack or convert it, or set data.format if the name misleads"
        )
    return "text"
