"""Looks at the machine before a head is started, so that a known cause is named instead of a late symptom.

Pure but for reading sizes and binding ports: nothing is started or changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import socket
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from cluster.errors import ClusterRefusedError

_MIB = 1 << 20

FREE_DISK_FRACTION = 0.05
"""Ray refuses to create objects when its temporary directory's disk is over 95 % full."""

FREE_DISK_BYTES = 256 * _MIB
"""Session directory, logs and working directories of some jobs."""

SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path on Linux."""

_SESSION_SOCKET = "/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store"

_DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "grpc", "opencensus", "prometheus_client", "virtualenv")
"""What `ray[default]` has above `ray`, without which the head runs but takes no job."""

_RANDOM_PORTS = range(20000, 30000)
"""Below the ephemeral range (32768 and up on Linux), so that no outgoing connection takes one by chance."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a head that somebody has to know before; all others Ray binds where the system has one free."""

    gcs: int
    dashboard: int
    client_server: int


def warnings_of(temp_root: Path, object_store_bytes: int, environ: Mapping[str, str]) -> list[str]:
    """What will work but not as well as it could, each with what to change."""
    found = []
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    if shared < object_store_bytes:
        found.append(
            f"/dev/shm has {shared // _MIB} MiB free and Ray's object store takes {object_store_bytes // _MIB} MiB: "
            f"Ray puts it under {temp_root} instead, which is slower. In a container start it with "
            f"`--shm-size={2 * object_store_bytes // _MIB}m`"
        )
    disk = shutil.disk_usage(temp_root)
    if disk.free < disk.total * FREE_DISK_FRACTION:
        found.append(
            f"{temp_root} is on a disk with {disk.free // _MIB} MiB of {disk.total // _MIB} MiB free: over 95 % full "
            "Ray stops creating objects. Free some, or name another directory with --temp-dir"
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if proxies and "127.0.0.1" not in exempt and exempt != "*":
        found.append(
            f"{proxies[0]} is set without 127.0.0.1 in no_proxy: plain `ray job submit` would ask the proxy for the "
            'dashboard. Use `python -m cluster.submit`, or eval "$(python -m cluster.head env)" first'
        )
    return found


def require(temp_root: Path) -> None:
    """Check what a head cannot do without.

    Raises:
        ClusterRefusedError: With the first cause found and what to change.
    """
    missing = [name for name in _DASHBOARD_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ClusterRefusedError(
            f"jobs need Ray's dashboard, and it needs {', '.join(missing)}: install `ray[default]` into this "
            "environment. `python -m tasks.train` runs without a head and without it"
        )
    if not temp_root.is_dir():
        raise ClusterRefusedError(f"temporary directory {temp_root} is not a directory; make it or name another")
    free = shutil.disk_usage(temp_root).free
    if free < FREE_DISK_BYTES:
        raise ClusterRefusedError(
            f"{temp_root} has {free // _MIB} MiB free, a head needs {FREE_DISK_BYTES // _MIB} MiB for its session; "
            "free some or name another directory with --temp-dir"
        )


def require_short(temp_dir: Path) -> None:
    """Check that Ray's socket paths under `temp_dir` fit.

    Raises:
        ClusterRefusedError: They do not.
    """
    length = len(str(temp_dir)) + len(_SESSION_SOCKET)
    if length > SOCKET_PATH_LIMIT:
        raise ClusterRefusedError(
            f"Ray's sockets under {temp_dir} would have paths of {length} bytes, Linux allows {SOCKET_PATH_LIMIT}; "
            "name a shorter directory with --temp-dir, such as /tmp"
        )


def choose_ports(port: int | None, dashboard_port: int | None, avoid: Ports | None = None) -> Ports:
    """Find free ports: those asked for, else Ray's usual ones where free, else others.

    Args:
        port: Asked for, or None.
        dashboard_port: Likewise.
        avoid: With which a head did not start: only what was asked for is taken from them again.

    Raises:
        ClusterRefusedError: A port that was asked for is taken.
    """
    taken = set() if avoid is None else set(astuple(avoid)) - {port, dashboard_port}
    return Ports(
        gcs=_choose("--port", port, 6379, taken),
        dashboard=_choose("--dashboard-port", dashboard_port, 8265, taken),
        client_server=_choose("", None, 10001, taken),
    )


def _choose(option: str, asked: int | None, usual: int, taken: set[int]) -> int:
    if asked is not None and not _is_free(asked):
        raise ClusterRefusedError(f"{option} {asked}: the port is taken; leave the option out to get a free one")
    candidates = [asked] if asked is not None else [usual, *random.sample(_RANDOM_PORTS, 50)]
    for candidate in candidates:
        if candidate not in taken and _is_free(candidate):
            taken.add(candidate)
            return candidate
    raise ClusterRefusedError(f"no free port among {candidates}; name two others with --port and --dashboard-port")


def _is_free(port: int) -> bool:
    """Whether a daemon could listen on `port` of any interface: what has it on another one would be mistaken for it."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As daemons do: a port in TIME_WAIT can be had.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
