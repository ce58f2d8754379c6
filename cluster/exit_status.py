"""The exit status of a job, which Ray forgets of one that is stopped: a shell above the job's command writes it down.

Who follows the job holds the file open, so that the status is still there when the head has gone with its directory.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

_RUNNER = "job"
_SCRIPT = """\
# FILE COMMAND...: runs the command of a job and writes its exit status to FILE.
# Ray's signal reaches the command by itself; this shell outlives it, to see how the command ends.
trap : TERM
file=$1
shift
"$@"
status=$?
echo "$status" >"$file"
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The status of one job, which may not have ended yet."""

    descriptor: int
    """Open for reading, as long as this process lives: it follows few jobs."""

    @classmethod
    def expect(cls, temp_dir: Path, submission_id: str) -> ExitStatus:
        """Make the file of a job that is about to be submitted, in the directory of its head."""
        path = temp_dir / submission_id
        return cls(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def __call__(self) -> int | None:
        """The status of the job's command, 128 + signal of one that a signal ended; None before its end."""
        text = os.pread(self.descriptor, 16, 0).decode()
        return int(text) if text.endswith("\n") else None


def runner(temp_dir: Path, submission_id: str) -> list[str]:
    """What stands before the command of a job."""
    return ["sh", str(temp_dir / _RUNNER), str(temp_dir / submission_id)]


def command_of(entrypoint: str, temp_dir: Path, submission_id: str) -> str:
    """The command of a job, as its user gave it."""
    return entrypoint.removeprefix(shlex.join(runner(temp_dir, submission_id)) + " ")


def write_runner(temp_dir: Path) -> None:
    """Put the shell's script into the directory of a head that starts."""
    (temp_dir / _RUNNER).write_text(_SCRIPT)
