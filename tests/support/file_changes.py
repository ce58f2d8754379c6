"""Sees every change to a file of a checkpoint just before it is made, in the process that makes it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
"""Events of Python's audit, beside `open` to write."""


def changes(folder: Path) -> list[str]:
    """Changes to files of checkpoints that processes have come to, each once, in order; see `FileChanges`."""
    lines = [line for path in sorted(folder.glob("changes-*")) for line in path.read_text().splitlines()]
    return list(dict.fromkeys(line.partition(" ")[2] for line in sorted(lines, key=lambda line: int(line.split()[0]))))


class FileChanges:
    """Sees each change to a file of a checkpoint before it is made, and writes down what it saw.

    A change is named by what is done and to what, without the step: `open layer-0001/weight/c/0`, `os.remove ...` when
    an old checkpoint goes; `os.rename .partial` publishes, `os.rename ` prunes.
    """

    def __init__(self, reach: Callable[[str, str], None], folder: Path, checkpoints: Path) -> None:
        """Tell `reach` of each change under `checkpoints`, and write them to a file in `folder`."""
        self._reach = reach
        self._root = f"{checkpoints}/"
        self._log = os.open(folder / f"changes-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
        elif event not in CHANGES:
            return
        path = self._path(event, arguments)
        if path is None or not path.startswith(self._root):
            return
        step, _, inner = path.removeprefix(self._root).partition("/")
        inner = re.sub(r"(\.preflight)-\w+", r"\1", inner)  # whose names are random
        change = f"{event} {inner or re.sub(r'^step-[0-9]+', '', step)}"
        os.write(self._log, f"{time.monotonic_ns()} {change}\n".encode())
        self._reach(change, "begin")

    @staticmethod
    def _path(event: str, arguments: tuple[Any, ...]) -> str | None:
        named = arguments[0]
        if isinstance(named, int):
            with suppress(OSError):
                return str(Path(f"/proc/self/fd/{named}").readlink())
            return None
        path = os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else None
        directory = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}.get(event)
        if path is not None and directory is not None and arguments[directory] not in (-1, None):
            with suppress(OSError):
                return str(Path(f"/proc/self/fd/{arguments[directory]}").readlink() / path)
        return path
