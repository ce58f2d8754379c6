"""Which processes have an arena mapped: they hold its memory, whatever has become of the one that made it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tiers.arena import ARENA_NAME, ArenaHandle
from tiers.control_groups import PROC


@dataclass(frozen=True, slots=True)
class ArenaIdentity:
    """Finds an arena in the tables of the kernel, also after its owner has ended."""

    owner: int
    """Process that made it."""
    inode: int

    @classmethod
    def of(cls, handle: ArenaHandle) -> ArenaIdentity:
        """Ask the kernel.

        Raises:
            OSError: The owner has ended already.
        """
        return cls(int(Path(handle.path).parts[2]), os.stat(handle.path).st_ino)  # noqa: PTH116 - the link is magic

    def users(self) -> set[int]:
        """Processes of this machine that have it mapped, as far as this user may see; and its owner, while it lives."""
        mapped = re.compile(rf"^\S+ \S+ \S+ \S+ {self.inode} +/memfd:{ARENA_NAME}", re.MULTILINE)
        found = set()
        for process in PROC.glob("[0-9]*"):
            try:
                maps = (process / "maps").read_text(errors="replace")
            except OSError:  # ended meanwhile, or of another user
                continue
            # A process that is being killed has no mappings any more, but the owner its descriptor still.
            if int(process.name) == self.owner or mapped.search(maps):
                found.add(int(process.name))
        return found
