"""What the demo says at its end: a piece of what the model wrote, and what to do next."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

_LINES = 8
_COLUMNS = 100
_BLANKS = re.compile(r"\s{25,}")
"""Deeper than code is indented: a small model writes blanks for long before it comes to a word again."""


def sample(text: str) -> str:
    """The beginning of a text, up to where only blanks follow for long."""
    lines = _BLANKS.split(text.strip())[0].splitlines()
    return "\n".join(line[:_COLUMNS].rstrip() for line in lines[:_LINES])


def next_steps(python: Path, recipe: str, run: Path, kept: Path | None) -> str:
    """Commands for a user whose demo has ended.

    Args:
        python: Interpreter.
        recipe: That the demo trained.
        run: The run directory.
        kept: State directory of the demo's head where that stays up.
    """
    own = (
        f"             {python} -m cluster.submit -- python -m tasks.train {recipe} \\\n"
        "                 --set data.path=/DIRECTORY/OF/TEXTS --set data.eval_path=/ANOTHER --set run.dir=/NEW/ONE"
    )
    if kept is None:
        own = f"             {python} -m cluster.head up\n{own}"
    else:
        own = f"             export MEGATRAIN_STATE={shlex.quote(str(kept))}\n{own}"
    return f"look at it   {python} -m tasks.inspect {run}\nyour own     {own.strip()}"


def stopped(repository: Path, command: Sequence[str] | None) -> str:
    """For a user who stopped the demo.

    Args:
        repository: Where its commands run.
        command: That goes on from what was saved; None where nothing was.
    """
    again = "the demo begins anew in a new directory whenever it is started"
    if command is None:
        return f"stopped      with nothing that could be gone on with; {again}"
    way_on = textwrap.indent(f"cd {shlex.quote(str(repository))}\n{shlex.join(command)}", " " * 13)
    return f"stopped      {again}; what was saved goes on with\n{way_on}"
