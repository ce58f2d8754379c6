"""Says what is wrong with a recipe: every problem at once, each with its key, the value got, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.recipe.words import allowed, allowed_values, nearest_value, section_of, shown, unknown_key

_ABSENT = object()


class RecipeError(ValueError):
    """A recipe cannot be used as it is. Its one argument is the whole message, which lists every problem found."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe."""

    key: str
    """`section.key`."""
    want: str
    """What is allowed, or what to do."""
    got: Any = _ABSENT

    def __str__(self) -> str:
        return f"{self.key}{'' if self.got is _ABSENT else ' = ' + shown(self.got)}: {self.want}"


class InvalidCombinationError(ValueError):
    """Raised by checks across keys; carries its problems through pydantic."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


def raise_problems(subject: str, problems: Iterable[Problem]) -> None:
    """Raise a RecipeError that lists `problems` of `subject`, if there are any: a line each where they are several."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise RecipeError(f"{subject}: {lines[0]}")
    if lines:
        raise RecipeError("\n  ".join([f"{subject}: {len(lines)} problems", *lines]))


def problems_of(error: ValidationError, model: type[BaseModel], given: Mapping[str, Any]) -> list[Problem]:
    """Translate what pydantic found in `given`, the input for `model`; one problem a key."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidCombinationError):
            problems.extend(cause.problems)
            continue
        problem = _problem(detail["type"], detail["loc"], model, given)
        if problem.key not in seen:
            seen.add(problem.key)
            problems.append(problem)
    return problems


def _problem(kind: str, location: tuple[int | str, ...], model: type[BaseModel], given: Mapping[str, Any]) -> Problem:
    """The problem at `location`; what pydantic appends for members of unions and lists is left out."""
    if not location:
        return Problem("recipe", "is no table of sections and keys")
    owner, got, path = model, given.get(str(location[0]), _ABSENT), [str(location[0])]
    for part in location[1:]:
        inner = section_of(owner.model_fields[path[-1]]) if path[-1] in owner.model_fields else None
        if inner is None or not isinstance(got, Mapping):
            break
        owner, got = inner, got.get(str(part), _ABSENT)
        path.append(str(part))
    key = ".".join(path)
    if path[-1] not in owner.model_fields:
        return Problem(key, unknown_key(path, owner, model), got)
    field = owner.model_fields[path[-1]]
    if kind == "missing" or got is _ABSENT:
        return Problem(key, f"is required: {allowed(field)}")
    return Problem(key, f"must be {allowed(field)}{nearest_value(got, allowed_values(field))}", got)
