"""What a key of a recipe may hold: the types of `sections`, and the strictness that all sections share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

MOST = 10**9
"""Of what is counted: beyond any use, and far from where sizes that are computed of it leave the range of a float."""
MOST_GIB = 2**20
"""1 PiB."""

Count = Annotated[int, Ge(1), Le(MOST)]
Actors = Annotated[int, Ge(1), Le(64)]
"""A process each, of some 200 MiB; 15 threads have saturated the memory of every machine measured."""
Threads = Annotated[int, Ge(1), Le(256)]
CountOrOff = Annotated[int, Ge(0), Le(MOST)]
Gibibytes = Annotated[float, Gt(0), Le(MOST_GIB)]
GibibytesOrNone = Annotated[float, Ge(0), Le(MOST_GIB)]
Beta = Annotated[float, Ge(0), Lt(1)]


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str | Path):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _given(path: Path) -> Path:
    if path == Path():
        raise ValueError("empty path")
    return path


Place = Annotated[Path, AfterValidator(_given)]
"""A path; an empty text is none."""

Places = Annotated[tuple[Place, ...], MinLen(1), BeforeValidator(_one_or_many)]
"""One path or glob, or a list of them."""


class Section(BaseModel):
    """Strict and closed: no unknown keys, no text for a number, no NaN or infinity; whole numbers pass as floats."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
