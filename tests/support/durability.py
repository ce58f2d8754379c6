"""What of a directory would outlive a loss of power: only what was fsynced, as POSIX promises it and no more.

`install` runs inside every process that writes (see `inside/sitecustomize.py`) and journals each fsync under a root: of
a file its content, of a directory its entries. `Journal` builds from it the tree as it would be found afterwards. Files
and directories are known by inode, so that a rename counts once the directory above is synced and keeps what is inside.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INSIDE = "MEGATRAIN_INSIDE"
ROOT = "MEGATRAIN_DURABLE_ROOT"
"""Variable that names the tree; nothing is journalled without it."""


@dataclass(frozen=True)
class Entry:
    """One fsync that returned."""

    inode: int
    content: bytes | None
    """Of a file."""
    entries: tuple[tuple[str, int, bool], ...] = ()
    """Of a directory: name, inode, whether it is a directory."""


class Recorder:
    """Journals what is fsynced under `root` into `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = f"{root}/", folder
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()

    def synced(self, sync: Callable[[int], None], descriptor: int) -> None:
        """Do the fsync of a descriptor, and journal what it made durable: what was there when it was called."""
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if not f"{path}/".startswith(self._root) or path.endswith(" (deleted)"):
            sync(descriptor)
            return
        found = look(Path(path))
        sync(descriptor)
        with self._lock:
            if found.inode not in self._held:
                # The kernel may give the number of an inode that is gone to another: hold it.
                with suppress(OSError):
                    self._held[found.inode] = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
            self.write(found)

    def write(self, entry: Entry) -> None:
        """Journal."""
        name = self._folder / f"synced-{time.monotonic_ns():020}-{os.getpid()}"
        if entry.content is not None:
            name.with_suffix(".content").write_bytes(entry.content)
        partial = name.with_suffix(".partial")
        partial.write_text(json.dumps({"inode": entry.inode, "entries": entry.entries}))
        partial.rename(name.with_suffix(".json"))

    def close(self) -> None:
        """Let go of what it held."""
        while self._held:
            os.close(self._held.popitem()[1])


def look(path: Path) -> Entry:
    """A file or directory as it is now."""
    if not path.is_dir():
        return Entry(path.stat().st_ino, path.read_bytes())
    entries = []
    for child in os.scandir(path):
        with suppress(FileNotFoundError):
            entries.append((child.name, child.inode(), child.is_dir(follow_symlinks=False)))
    return Entry(path.stat().st_ino, None, tuple(sorted(entries)))


def install() -> None:
    """Make this process journal."""
    if ROOT not in os.environ:
        return
    recorder, sync = Recorder(Path(os.environ[ROOT]), Path(os.environ[INSIDE])), os.fsync

    def fsync(descriptor: int) -> None:
        recorder.synced(sync, descriptor if isinstance(descriptor, int) else descriptor.fileno())

    os.fsync = fsync  # type: ignore[assignment]


def begin(root: Path, folder: Path) -> None:
    """Say that all there is now is durable."""
    for stale in folder.glob("synced-*"):
        stale.unlink()
    recorder = Recorder(root, folder)
    for path in (root, *root.rglob("*")):
        if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            recorder.write(look(path))


class Journal:
    """The fsyncs of a tree, in order."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._inode = root.stat().st_ino
        self.entries: list[Entry] = []
        for path in sorted(folder.glob("synced-*.json")):
            fields, content = json.loads(path.read_text()), path.with_suffix(".content")
            entries = tuple((name, inode, is_directory) for name, inode, is_directory in fields["entries"])
            self.entries.append(Entry(fields["inode"], content.read_bytes() if content.exists() else None, entries))

    def after_loss(self, target: Path, length: int | None = None) -> None:
        """Build the tree at `target` as after a loss of power behind the first `length` fsyncs; None for all."""
        self._build(target, {entry.inode: entry for entry in self.entries[:length]})

    def after_chance(self, root: Path, target: Path, chance: random.Random) -> None:
        """Likewise of a disk that has written some of what nobody synced, as it is allowed to, in any order.

        Args:
            root: The tree as the kernel had it at the end.
            target: Where to build.
            chance: Decides for each file and each directory.
        """
        durable = {entry.inode: entry for entry in self.entries}
        for path in (root, *root.rglob("*")):
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                continue
            now = look(path)
            if chance.random() < 0.5:
                continue
            if now.content is not None and chance.random() < 0.3:  # its length is there, the end of its data is not
                before = durable.get(now.inode)
                kept = chance.randint(_common(now.content, before), len(now.content))
                now = Entry(now.inode, now.content[:kept] + bytes(len(now.content) - kept))
            durable[now.inode] = now
        self._build(target, durable)

    def _build(self, target: Path, durable: dict[int, Entry]) -> None:
        """A file that was never synced is found empty, a directory without entries."""

        def build(path: Path, inode: int) -> None:
            path.mkdir(mode=0o700)
            for name, child, is_directory in durable[inode].entries if inode in durable else ():
                if is_directory:
                    build(path / name, child)
                else:
                    entry = durable.get(child)
                    (path / name).write_bytes(entry.content or b"" if entry else b"")

        build(target, self._inode)


def _common(content: bytes, synced: Entry | None) -> int:
    """How many bytes at the beginning are as they were synced."""
    before = synced.content if synced is not None and synced.content is not None else b""
    pairs = enumerate(zip(content, before, strict=False))
    return next((place for place, (now, then) in pairs if now != then), min(len(content), len(before)))


def put_back(root: Path, found: Path) -> None:
    """Let the tree that was found after a loss take the place of the one that was lost."""
    shutil.rmtree(root)
    found.rename(root)
