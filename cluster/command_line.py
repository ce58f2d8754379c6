"""What every command of `tasks` and `cluster` shares: help out of its module's docstring, refusals of one form.

A refusal is one message on standard error, `NAME: refused: WHAT IS WRONG`, with status 2; a failure has status 1.
Output that nobody takes is neither (`cluster.console`).
"""

from __future__ import annotations

import argparse
import errno
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cluster import console

FAILED, REFUSED = 1, 2


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of `python -m MODULE`, and says in what way it cannot go on."""

    def __init__(self, module: str, doc: str | None, prog: str | None = None) -> None:
        """Make a parser without arguments, and let nothing that is printed from now on fail.

        Args:
            module: As after `python -m`, e.g. `tasks.plan`.
            doc: The module's docstring, whose paragraphs are the help; lines of usage in it are argparse's business.
            prog: Shown instead of the module, of a command within it.
        """
        console.install()
        paragraphs = (doc or "").strip().split("\n\n")
        super().__init__(
            prog=prog or f"python -m {module}",
            description="\n\n".join(part for part in paragraphs if not part.lstrip().startswith("python -m")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._name = module.rpartition(".")[2]
        # Wherever an argument has `type=Path`: of an empty one, as of a variable that is not set, Path makes `.`.
        self.register("type", Path, _path)

    def add_overrides(self) -> None:
        """Take `--set section.key=value`, any number of times, as `overrides`."""
        self.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="section.key=value",
            help="override a key of the recipe; may be repeated",
        )

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        self.exit(self.refuse(f"{message} (see {self.prog} --help)"))

    def refuse(self, why: object) -> int:
        """Say that nothing was done, and return the exit status."""
        print(f"{self._name}: refused: {in_words(why)}", file=sys.stderr, flush=True)
        return REFUSED

    def fail(self, why: object) -> int:
        """Say that what was begun did not end well, and return the exit status."""
        print(f"{self._name}: failed: {in_words(why)}", file=sys.stderr, flush=True)
        return FAILED

    def printed(self, status: int) -> int:
        """The exit status of a command whose result is what it prints: `status`, or of a refusal where that was lost.

        Not lost is what a reader did not want who ended before (`| head`).
        """
        error = console.lost()
        return status if error is None else self.refuse(error)


def in_words(why: object) -> str:
    """A refusal by the operating system with the path, what it said and what to do; anything else as it says itself."""
    if not isinstance(why, OSError) or why.errno is None or isinstance(why, ConnectionError):
        return str(why)
    where = why.filename if why.filename is not None else "a file, or where this command's output goes"
    name = errno.errorcode.get(why.errno, str(why.errno))
    advice = _ADVICE.get(why.errno, "look at the disk, or name another place")
    return f"cannot read or write {where}: {why.strerror} ({name}); {advice}"


_ADVICE = {
    errno.ENOSPC: "free space there, or name a place on another disk",
    errno.EDQUOT: "raise the disk quota, or name a place on another disk",
    errno.EROFS: "name a place that is not mounted read-only",
    errno.EACCES: "change its owner or mode, or name another place",
    errno.EPERM: "change its owner or mode, or name another place",
    errno.ENOENT: "make it, or name another place",
    errno.ENOTDIR: "a part of the path is no directory; name another place",
    errno.EISDIR: "it is a directory; name a file",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name a place on another disk",
    errno.EIO: "the drive may be failing: see `dmesg`, and name a place on another disk",
}


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''; the current directory is `.`")
    return Path(text)


def positive(text: str) -> float:
    """A finite number above 0, as a type of an argument."""
    return _number(text, lambda value: value > 0, "a number above 0")


def not_negative(text: str) -> float:
    """A finite number from 0, as a type of an argument."""
    return _number(text, lambda value: value >= 0, "a number from 0")


def count(text: str) -> int:
    """A whole number from 1, which may be written as 2e9, as a type of an argument."""
    return int(_number(text, lambda value: value >= 1 and value == int(value), "a whole number from 1"))


def count_to(most: int) -> Callable[[str], int]:
    """Whole numbers from 1 to `most`, as a type of an argument."""

    def count_so_far(text: str) -> int:
        which = f"a whole number from 1 to {most}"
        return int(_number(text, lambda value: 1 <= value <= most and value == int(value), which))

    return count_so_far


port = count_to(65_535)
"""A number of a TCP port, as a type of an argument."""


def _number(text: str, accepts: Callable[[float], bool], which: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not accepts(value):
        raise argparse.ArgumentTypeError(f"must be {which}, got {text!r}")
    return value
