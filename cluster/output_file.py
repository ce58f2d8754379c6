"""The file of `--out`: replaced whole where it is one, written into where it is a pipe or a device, through links."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import OutputRefusedError


@dataclass(frozen=True)
class OutputFile:
    """A place that could be written when it was looked at."""

    path: Path
    """As the user named it."""
    replaced: Path | None
    """The file behind all links, which need not exist; None where `path` is a pipe or a device, to write into."""

    @classmethod
    def at(cls, path: Path) -> OutputFile:
        """Look at `path` before the work whose result it is to get.

        Raises:
            OutputRefusedError: It is a directory, a disk or a socket, or its directory does not exist or takes no file.
            OSError: It cannot be looked at, as one whose name is too long.
        """
        real = Path(os.path.realpath(path))
        try:
            found = path.stat()
        except FileNotFoundError:
            found = None
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise OutputRefusedError(f"--out {path} is a directory; name a file")
        if found is not None and (stat.S_ISBLK(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
            raise OutputRefusedError(f"--out {path} is no file, pipe or character device; name a file")
        # /dev/stdout leads to what may have no name any more.
        if found is not None and not (stat.S_ISREG(found.st_mode) and real.exists() and real.samefile(path)):
            if not os.access(path, os.W_OK):
                raise OutputRefusedError(f"--out {path} is not writable; name another file")
            return cls(path, None)
        if not real.parent.is_dir():
            raise OutputRefusedError(
                f"--out {path}: the directory {real.parent} does not exist; name a file in a directory that exists"
            )
        if not os.access(real.parent, os.W_OK | os.X_OK):
            raise OutputRefusedError(f"--out {path}: the directory {real.parent} is not writable; name another one")
        return cls(path, real)

    def write(self, content: bytes) -> None:
        """Write all of it; a file has its old content or the new one after a crash, never a part.

        Raises:
            OSError: It cannot be written; what is at `path` is as it was, unless that was no file.
        """
        try:
            if self.replaced is None:
                # Neither made nor cut: it is there.
                with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC), "wb") as opened:
                    opened.write(content)
            else:
                _replace(self.replaced, content)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise


def _replace(path: Path, content: bytes) -> None:
    # A name of its own, which nothing else has: no longer than any file's may be.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
