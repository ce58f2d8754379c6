"""What the types of a recipe's keys cannot check: values that have no place in any, and references between them."""

from __future__ import annotations

import datetime
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.recipe.errors import Problem
from pipeline.recipe.resolved import Recipe

_RAY_COPY = "working_dir_files"
"""Folder in which Ray keeps its copies of a job's working directory, and deletes them."""

_MOST_BITS = 10_000
"""Python writes no longer number out: messages could not show it."""


def unusable_values(value: Any, key: str = "") -> Iterator[Problem]:
    """Find what TOML has and no key takes: dates, numbers of thousands of digits, names of files that are no text.

    Args:
        value: A table of what a recipe and the command line say, with paths resolved, or a part of it.
        key: What leads to it.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            path = f"{key}.{name}" if key else name
            if _escaped(name) == name:
                yield from unusable_values(inner, path)
            else:
                yield Problem(_escaped(path), "is no text in UTF-8, and no key")
    elif isinstance(value, list):
        for inner in value:
            yield from unusable_values(inner, key)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        yield Problem(key, f"is a number of more than {_MOST_BITS:,} bits")
    elif isinstance(value, datetime.date | datetime.time):
        yield Problem(key, "dates are not used; write text in quotes", str(value))
    elif isinstance(value, str) and _escaped(value) != value:
        yield Problem(key, f"{_escaped(value)} is no text in UTF-8; rename that file or folder, or name another")


def _escaped(text: str) -> str:
    """Text that any file takes: bytes of a name that are not UTF-8, surrogates in Python, become escapes."""
    return text.encode(errors="backslashreplace").decode()


def wrong_references(recipe: Recipe) -> Iterator[Problem]:
    """What only shows once the recipe is whole."""
    keys = {f"{name}.{key}" for name, section in recipe for key in type(section).model_fields}
    for key in recipe.run.accept_changes:
        if key not in keys:
            yield Problem("run.accept_changes", "is no key of a recipe; write section.key", key)
    if _RAY_COPY in recipe.run.dir.parts:
        want = "lies in Ray's copy of the working directory, which Ray deletes; give an absolute path or leave it out"
        yield Problem("run.dir", want, str(recipe.run.dir))
    yield from _data_among_own_files(recipe)


def _data_among_own_files(recipe: Recipe) -> Iterator[Problem]:
    """What the run writes to a folder that it searches for data would be data of its resume, and of later runs."""
    for key, paths in (("data.path", recipe.data.path), ("data.eval_path", recipe.data.eval_path or ())):
        for path in paths:
            for owner, directory in recipe.own_directories().items():
                if _real(searched_from(path)) == _real(directory):
                    want = f"is where {key} = {path} looks for data; give it a folder of its own, which may lie in that"
                    yield Problem(owner, want, str(directory))


def searched_from(path: Path) -> Path:
    """The folder that a glob is searched from; of a path without magic the path itself."""
    while glob.has_magic(str(path)):
        path = path.parent
    return path


def _real(path: Path) -> str:
    """Without links; unlike Path.resolve also where they lead in a circle."""
    return os.path.realpath(path)
