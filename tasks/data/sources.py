"""From paths, directories and globs to a sorted list of files, each with its format. Reads names only."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file."""

    path: Path
    format: FileFormat
    num_bytes: int


def find_files(settings: DataSettings) -> tuple[SourceFile, ...]:
    """List the input files: paths in the order given, sorted by name within each, every file once.

    Raises:
        DataError: a path does not exist, matches nothing, or has a format that cannot be told.
    """
    found: dict[Path, SourceFile] = {}
    for path in settings.paths:
        for file in _expand(path, settings):
            key = file.resolve()
            if key not in found:
                found[key] = SourceFile(file, _format_of(file, settings), file.stat().st_size)
    return tuple(found.values())


def _expand(path: Path, settings: DataSettings) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_below(path, settings)
    if glob.has_magic(str(path)):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(Path(name) for name in names if Path(name).is_file())
        if matches:
            return matches
        raise DataError(f"{settings.key} {path} matches no file")
    raise DataError(f"{settings.key} {path} does not exist")


def _files_below(directory: Path, settings: DataSettings) -> list[Path]:
    patterns = settings.suffixes or tuple(f"*{ext}" for ext in _extensions(settings))
    files: list[Path] = []
    seen_extensions: set[str] = set()
    for root, folders, names in os.walk(directory):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns):
                files.append(Path(root) / name)
            else:
                seen_extensions.add(Path(name).suffix or name)
    if not files:
        others = f"; it holds {', '.join(sorted(seen_extensions)[:8])}" if seen_extensions else "; it is empty"
        raise DataError(
            f"{settings.key} {directory} holds no file that matches {', '.join(patterns)}{others}. "
            'Name what to take with data.suffixes, e.g. ["*.py"]'
        )
    return sorted(files)


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
