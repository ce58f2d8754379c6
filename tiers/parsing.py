"""JSON and TOML that others wrote: whatever is wrong with a text is a ValueError."""

from __future__ import annotations

import json
import tomllib
from typing import Any

MAX_DEPTH = 100
"""Tables and lists within one another: far from where Python's recursion ends, also in what comes after a parser."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is none, is no UTF-8, or is nested deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    # Most texts open no more in all: rows of data are not walked.
    opening = (text.count("[") + text.count("{")) if isinstance(text, str) else (text.count(b"[") + text.count(b"{"))
    if opening > MAX_DEPTH:
        _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is none, or is nested deeper than MAX_DEPTH.
    """
    try:
        parsed = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(parsed)
    return parsed


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in values if isinstance(inner, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} deep")
