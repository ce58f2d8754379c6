"""Words for messages about a recipe: what a key allows, and which valid name is nearest to a wrong one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

SHOWN_CHARACTERS = 80

_PLAIN_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    Path: "a path in quotes",
    dict: "a table",
}

_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "min_lr_ratio": "optimizer.final_lr_ratio",
    "batch_size": "train.sequences_per_step",
    "global_batch_size": "train.sequences_per_step",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "grad_accum": "train.sequences_per_step",
    "grad_accumulation": "train.sequences_per_step",
    "gradient_accumulation_steps": "train.sequences_per_step",
    "max_steps": "train.steps",
    "num_train_steps": "train.steps",
    "max_length": "train.sequence_length",
    "max_seq_len": "train.sequence_length",
    "dtype": "precision.mode",
    "torch_dtype": "precision.mode",
    "output_dir": "run.dir",
    "model_name_or_path": "model.source",
    "train_file": "data.path",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "eval.every_steps",
    "logging_steps": "log.every_s",
}
"""What other trainers call our keys: too far from ours for a spelling distance."""


def shown(value: Any) -> str:
    """A value as TOML would show it, shortened."""
    return shortened(as_toml(value))


def as_toml(value: Any) -> str:
    """A value as TOML would show it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def shortened(text: str) -> str:
    """What of a text a message has room for."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that `field` holds, if it is a table of keys."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def allowed(field: FieldInfo) -> str:
    """What `field` allows, e.g. `a whole number, at least 1`."""
    section = section_of(field)
    if section is not None:
        required = [name for name, inner in section.model_fields.items() if inner.is_required()]
        return f"a table with {', '.join(required or section.model_fields)}"
    return _describe(field.annotation, field.metadata)


def allowed_values(field: FieldInfo) -> list[str]:
    """The words that `field` allows; empty where it takes no fixed ones."""
    return [str(value) for value in _literals(field.annotation)]


def nearest_value(got: Any, values: Sequence[str]) -> str:
    """A hint at the allowed word nearest to `got`; empty where there is none."""
    nearest = difflib.get_close_matches(str(got).lower(), values, n=1, cutoff=0.5)
    return f"; did you mean {shown(nearest[0])}?" if nearest else ""


def unknown_key(path: Sequence[str], owner: type[BaseModel], recipe: type[BaseModel]) -> str:
    """Say that the last name of `path` is no key of `owner`, which is the nearest, and what keys there are."""
    name, valid = path[-1], list(owner.model_fields)
    everywhere = dict(_keys(recipe))
    if owner is recipe:
        homes = everywhere.get(name) or _renamed(name)
        nearest = homes or difflib.get_close_matches(name, valid, n=1, cutoff=0)[0]
        return f"no such section; did you mean {nearest}? Sections: {', '.join(valid)}"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.75)
    nearest = (
        (close[0] if close else None)
        or everywhere.get(name)
        or _renamed(name)
        or difflib.get_close_matches(name, valid, n=1, cutoff=0)[0]
    )
    return f"no such key; did you mean {nearest}? Keys of {'.'.join(path[:-1])}: {', '.join(valid)}"


def _keys(recipe: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Names of keys and where they stand: name, `section.name`, or several where the name is not unique."""
    homes: dict[str, list[str]] = {}
    for section_name, field in recipe.model_fields.items():
        section = section_of(field)
        for name in section.model_fields if section else ():
            homes.setdefault(name, []).append(f"{section_name}.{name}")
    for name, places in homes.items():
        yield name, " or ".join(places)


def _renamed(name: str) -> str | None:
    close = difflib.get_close_matches(name, _OTHER_NAMES, n=1, cutoff=0.8)
    return _OTHER_NAMES[close[0]] if close else None


def _literals(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _literals(member)


def _describe(kind: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _describe(arguments[0], arguments[1:])
    if origin is Literal:
        return " or ".join(shown(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_describe(member) for member in arguments if member is not NoneType)
    if origin is tuple:
        members = [member for member in arguments if member is not Ellipsis]
        count = "" if Ellipsis in arguments else f"{len(members)} values, each "
        member = _describe(members[0])
        alone = any(isinstance(item, BeforeValidator) for item in metadata)
        return f"{member}, or a list of such" if alone else f"a list of {count}{member}"
    return ", ".join([_PLAIN_TYPES[origin or kind], *_limits(metadata)])


def _limits(metadata: Iterable[Any]) -> Iterator[str]:
    for limit in metadata:
        match limit:
            case Ge(ge=bound):
                yield f"at least {bound}"
            case Gt(gt=bound):
                yield f"above {bound}"
            case Le(le=bound):
                yield f"at most {bound}"
            case Lt(lt=bound):
                yield f"below {bound}"
            case _ if getattr(limit, "pattern", None):
                yield f"matching {limit.pattern}"
            case _:
                pass
