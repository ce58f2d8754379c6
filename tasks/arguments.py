"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
import math

from pipeline.recipe.values import MOST_GIB


def gibibytes(text: str) -> float:
    """A number of GiB above 0, with the same limit as in a recipe: more leaves the range in which bytes are counted."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"must be a number above 0, at most {MOST_GIB}, got {text!r}")
    return value
