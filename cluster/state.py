"""What a running head leaves on disk: one JSON file and one token file, both readable by their owner only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.errors import ClusterError, ClusterRefusedError
from cluster.processes import ProcessId, processes_of

FORMAT_VERSION = 1


@dataclass(frozen=True)
class HeadState:
    """A head that was started, or is being started while `address` is empty."""

    marker: str
    """Identity: every process of the head carries it in its environment."""
    address: str
    """`host:port` of the head, for `RAY_ADDRESS`."""
    dashboard_url: str
    temp_dir: Path
    """Mode 0700. Ray's sessions and logs lie in it; owned by the head and removed with it."""
    token_path: Path
    processes: tuple[ProcessId, ...] = ()
    """The daemons right after the start."""

    @property
    def alive(self) -> bool:
        """Whether any process of it still runs."""
        return bool(processes_of(self.marker, self.processes))

    def token(self) -> str:
        """The token, for a request's header; never to be printed or put into an environment."""
        return self.token_path.read_text()


@dataclass(frozen=True)
class StateDirectory:
    """The directory that holds the state of at most one head."""

    path: Path

    @property
    def _file(self) -> Path:
        return self.path / "head.json"

    @property
    def token_path(self) -> Path:
        """Where the token of this directory's head lies while it is up."""
        return self.path / "token"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory against a second `up` or `down`.

        Raises:
            ClusterRefusedError: Another one is at work.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.path / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ClusterRefusedError(
                    f"another `cluster.head up` or `down` is at work in {self.path}; wait for it"
                ) from error
            yield

    def load(self) -> HeadState | None:
        """The recorded head, alive or not; None where there is none."""
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            record = json.loads(content)
            if not isinstance(record, dict):
                raise ValueError(f"it holds no table of fields but {type(record).__name__}")
            version = record.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"format_version {version}, this program knows {FORMAT_VERSION}")
            record["processes"] = tuple(ProcessId(**process) for process in record["processes"])
            for name in ("temp_dir", "token_path"):
                record[name] = _absolute(record[name])
            if wrong := [name for name in ("marker", "address", "dashboard_url") if not isinstance(record[name], str)]:
                raise ValueError(f"{', '.join(wrong)} must be text")
            if not record["marker"]:
                raise ValueError("the marker is empty")
            return HeadState(**record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ClusterError(
                f"{self._file} is not the state of a head ({error}); look for its processes and remove it by hand"
            ) from error

    def save(self, state: HeadState) -> None:
        """Record a head, replacing what was recorded."""
        record = asdict(state) | {"format_version": FORMAT_VERSION}
        temporary = self._file.with_suffix(".partial")
        write_private(temporary, json.dumps(record, default=str, indent=1))
        temporary.replace(self._file)

    def write_token(self) -> Path:
        """Make a fresh token of 256 bits and return its file."""
        write_token(self.token_path)
        return self.token_path

    def clear(self) -> None:
        """Forget the head and its token."""
        self.token_path.unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)


def _absolute(text: str) -> Path:
    """A path that `down` may remove: of another, as an empty one, it would be the current folder."""
    path = Path(text)
    if not path.is_absolute():
        raise ValueError(f"{text!r} is no absolute path")
    return path


def write_token(path: Path) -> None:
    """Write a fresh token of 256 bits to `path`, mode 0600."""
    write_private(path, secrets.token_hex(32))


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else could ever read, not even while it is made."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
