"""A run's directory: one run at a time, and left as it was found when a run is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from tasks.memory_account import FILE_NAME, MemoryAccount
from tiers.durable_files import FILE_MODE, make_directory, replace_file, sync_directory

LOCK_NAME = "run.lock"
_DATA_NAME = "data"
"""Directory of the data's tokens, unless the recipe keeps them elsewhere."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 100
"""Each fails only where another run was refused in the same moment, and removed what this one had just opened."""


class RunDirectoryError(ValueError):
    """The run directory cannot be used as it is."""


class RunDirectory:
    """Held from entry to exit. What was put there for a run that never began is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._created: tuple[Path, ...] = ()
        """Directories that entry made, the innermost first."""
        self._added: list[Path] = []
        """What else was not there before."""
        self._lock: int | None = None
        self.has_begun = False
        """Whether the run has: what it wrote here is its own."""

    def __enter__(self) -> RunDirectory:
        """Take the directory.

        Raises:
            RunDirectoryError: It is no directory, not writable, or another run is at work in it.
        """
        try:
            self._take()
            assert self._lock is not None
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._lock or 0, 32, 0).decode(errors="replace").strip()
            self._release()
            raise RunDirectoryError(
                f"run.dir = {self._path} is in use by the run of process {holder}; end it, or give another run.dir"
            ) from None
        except OSError as error:
            self._remove_added()
            self._release()
            advice = "free space there, or give another" if error.errno in _FULL else "give another"
            raise RunDirectoryError(
                f"run.dir = {self._path} cannot be used: {error.strerror} ({error.filename or LOCK_NAME}); {advice}"
            ) from error
        return self

    def keep(self, recipe_toml: str, account: MemoryAccount) -> None:
        """The run begins: write its recipe and where its bytes live; from now on the directory stays."""
        replace_file(self._path / "recipe.toml", recipe_toml.encode())
        replace_file(self._path / FILE_NAME, account.as_json().encode())
        for created in self._created:
            # Checkpoints are worth nothing after a crash that forgets the directory above them.
            sync_directory(created.parent)
        self.has_begun = True
        self.leave()

    def leave(self) -> None:
        """Let what is there stay, as the tokens of a run that failed before its first step."""
        self._created, self._added = (), []

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_added()
        self._release()

    def _take(self) -> None:
        """Make the directory, and lock its lock file."""
        path = self._path / LOCK_NAME
        for tries_left in reversed(range(_TRIES)):
            self._created = tuple(parent for parent in (self._path, *self._path.parents) if not parent.exists())
            with contextlib.suppress(FileNotFoundError) if tries_left else contextlib.nullcontext():
                make_directory(self._path)
                self._lock, is_new = _open_lock(path)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it may have been refused and have removed it: the next run would lock another of this name.
                if os.path.samestat(os.fstat(self._lock), path.stat()):
                    data = self._path / _DATA_NAME
                    self._added = [path] * is_new + [data] * (not data.exists())
                    return
            self._release()
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    def _remove_added(self) -> None:
        """While the lock is held: whoever waits for it then finds that it is another file, or none."""
        if self._created:
            shutil.rmtree(self._path, ignore_errors=True)
            # Another run may have begun in a parent meanwhile: only empty ones go.
            with contextlib.suppress(OSError):
                for parent in self._created[1:]:
                    with contextlib.suppress(FileNotFoundError):
                        parent.rmdir()
            return
        for path in reversed(self._added):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _open_lock(path: Path) -> tuple[int, bool]:
    """Open the lock file; return it, and whether it is a new one."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE), True
    except FileExistsError:
        return os.open(path, flags), False
