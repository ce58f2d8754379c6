"""Reads a recipe: TOML file plus `--set section.key=value`, checked as a whole, and writes the resolved one back.

Paths are relative to where they are written: in a file to the file's folder, on a command line to the current
directory; `~` is the home directory. A resolved recipe holds absolute paths only.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from pipeline.recipe.checks import unusable_values, wrong_references
from pipeline.recipe.errors import Problem, RecipeError, problems_of, raise_problems
from pipeline.recipe.resolved import Recipe
from pipeline.recipe.words import SHOWN_CHARACTERS, as_toml, shortened, shown
from tiers.parsing import MAX_DEPTH, parse_toml

_PATH_KEYS = {
    "run.dir": (),
    "run.resume": ("auto", "never"),
    "model.source": (),
    "model.config": (),
    "data.path": (),
    "data.eval_path": (),
    "data.tokenizer": ("bytes",),
    "data.cache_dir": (),
    "memory.nvme_dir": (),
}
"""Keys that hold paths, and the words among their values that are not paths."""

_ROUNDING_KEYS = ("memory.mlp_chunk_tokens",)
"""Keys of harmless sections that decide in which order sums are made, as `train.micro_batch` does."""

_HARMLESS_SECTIONS = ("run.", "memory.", "checkpoint.", "eval.", "log.")
_HARMLESS_KEYS = ("train.device", "train.compile", "train.max_skipped_in_a_row", "data.eval_path", "data.cache_dir")

_MAX_CHARACTERS = 1_000_000


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override, check and resolve a recipe.

    Args:
        path: TOML file.
        overrides: `section.key=value` each. A value is TOML; what is no TOML is taken as text, so quotes may be left
            out; an empty value removes the key.

    Raises:
        RecipeError: The file cannot be read or does not make a valid recipe. Lists every problem found.
    """
    values = _parsed(_read(path), str(path))
    _resolve_paths(values, path.absolute().parent)
    malformed = [problem for override in overrides if (problem := _override(values, override))]
    _name_run(values, path)
    raise_problems(str(path), [*malformed, *unusable_values(values)])
    recipe = _checked(values, str(path))
    raise_problems(str(path), wrong_references(recipe))
    return recipe


def parse_recipe(text: str, source: str = "recipe") -> Recipe:
    """Read back what `recipe_toml` wrote, e.g. from a checkpoint; `source` is what messages call it.

    Raises:
        RecipeError: The text is not a valid resolved recipe of this version.
    """
    return _checked(_parsed(text, source), source)


def recipe_toml(recipe: Recipe) -> str:
    """The recipe as TOML that `load_recipe` reads back as an equal one, defaults spelled out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that two recipes set differently."""

    key: str
    """`section.key`."""
    before: str
    after: str
    """Values as TOML shows them; `not set` where there is none."""

    @property
    def changes_result(self) -> bool:
        """Whether the run would learn something else; what only moves bytes or writes files does not."""
        if self.key == "run.seed" or self.key in _ROUNDING_KEYS:
            return True
        return not (self.key.startswith(_HARMLESS_SECTIONS) or self.key in _HARMLESS_KEYS)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def differences(before: Recipe, after: Recipe) -> tuple[Difference, ...]:
    """Every key that differs, in the order of the sections: what a resume must accept or refuse."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return tuple(Difference(key, *_apart(old[key], new[key])) for key in old if old[key] != new[key])


def _apart(old: Any, new: Any) -> tuple[str, str]:
    """Two values that differ, each cut to where they do."""
    texts = ["not set" if value is None else as_toml(value) for value in (old, new)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - SHOWN_CHARACTERS // 4) if max(map(len, texts)) > SHOWN_CHARACTERS else 0
    before, after = ("..." * (start > 0) + shortened(text[start:]) for text in texts)
    return before, after


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for section_name, section in recipe.model_dump(mode="json").items():
        for key, value in section.items():
            yield f"{section_name}.{key}", value


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_MAX_CHARACTERS + 1)  # what is no file may have no end
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise RecipeError(f"{path}: is a directory; give the recipe's TOML file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > _MAX_CHARACTERS:
        raise RecipeError(f"{path}: is no recipe: it has more than {_MAX_CHARACTERS:,} characters")
    return text


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"{source}: is not TOML: {error}") from None


def _checked(values: dict[str, Any], source: str) -> Recipe:
    try:
        # JSON is what TOML amounts to; in pydantic's JSON mode strict types still take text for a path.
        return Recipe.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise_problems(source, problems_of(error, Recipe, values))
        raise


def _override(values: dict[str, Any], override: str) -> Problem | None:
    """Apply one `section.key=value` to `values`."""
    key, equals, text = (part.strip() for part in override.partition("="))
    parts = key.split(".")
    if not equals or not 2 <= len(parts) <= MAX_DEPTH or not all(parts):
        return Problem(f"--set {override}", "must have the form section.key=value")
    table: Any = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(f"--set {override}", f"{part} is not a table: it is {shown(table)}")
    if text:
        table[parts[-1]] = _resolved(key, _override_value(text), Path.cwd())
    else:
        table.pop(parts[-1], None)
    return None


def _override_value(text: str) -> Any:
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    value = parsed["value"]
    return text if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time) else value


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    for name, section in values.items():
        if isinstance(section, dict):
            for key, value in section.items():
                section[key] = _resolved(f"{name}.{key}", value, folder)


def _resolved(key: str, value: Any, folder: Path) -> Any:
    """`value` with paths made absolute, if `key` holds paths."""
    words = _PATH_KEYS.get(key)
    if words is None or value in words:
        return value
    if isinstance(value, list):
        return [_resolved(key, item, folder) for item in value]
    if not isinstance(value, str) or not value:
        return value  # to be refused: an empty path would become the folder itself
    expanded = os.path.expanduser(value)  # noqa: PTH111 - Path.expanduser raises for unknown users
    return os.path.normpath(folder / expanded)


def _name_run(values: dict[str, Any], path: Path) -> None:
    """Give the run a name and a directory if it has none."""
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
        run.setdefault("dir", str(Path.home() / "megatrain" / str(run["name"])))
