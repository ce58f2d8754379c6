"""Joins a driver to Ray: to the head it runs under or is pointed at, else to an embedded one of its own.

`tasks` uses this; no other module calls `ray.init`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.services import resolve_ip_for_localhost
from ray.exceptions import RayError

from cluster import processes
from cluster.address import HeadAddress
from cluster.environment import HEAD_MARKER, OBJECT_STORE_BYTES, SESSION_FOLDER, settings
from cluster.errors import ClusterError, ClusterRefusedError, said
from cluster.load import machine_load
from cluster.preflight import require_short
from cluster.state import write_private

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_REMOVE_S = 5.0
_PREFIX = "mt-"
_END_GRACE_S = 1.0
"""For daemons of a start that failed: they hold nothing yet, and some do not end before they are up."""
_START_S = 30
"""Ray's own patience with its raylet, which no setting changes (2.60)."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A Ray that this process is the driver of."""

    address: str
    """`host:port`."""
    embedded: bool
    """Whether it was started for this process and ends with it."""
    dashboard_url: str | None
    """None where there is no dashboard."""


@contextlib.contextmanager
def connect(
    address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None
) -> Iterator[Connection]:
    """Be a driver for the duration of the context.

    Args:
        address: `HOST:PORT` of a running head. None takes `RAY_ADDRESS`, which Ray sets in a job; without it an
            embedded Ray starts.
        num_cpus: CPUs that an embedded Ray hands out; None counts the machine's.
        num_gpus: Likewise GPUs.

    Raises:
        ClusterRefusedError: The address has another form.
        ClusterError: No head answers at the address, or the embedded one did not start.
    """
    named = "RAY_ADDRESS" if address is None else "--address"
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or None
    if address is None:
        with embedded(num_cpus=num_cpus, num_gpus=num_gpus) as connection:
            yield connection
        return
    head = HeadAddress.parse(address, named)
    try:
        _where_ray_goes(head).knock()
        context = ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, RayError) as error:
        raise ClusterError(
            f"no Ray head could be joined at {address}: {said(error)}. Start one with `python -m cluster.head up` and "
            "take its variables from `python -m cluster.head env`, or unset RAY_ADDRESS to run without one"
        ) from error
    try:
        yield Connection(_gcs_address(), embedded=False, dashboard_url=_url(context.dashboard_url))
    finally:
        ray.shutdown()


@contextlib.contextmanager
def embedded(
    *, num_cpus: int | None = None, num_gpus: int | None = None, temp_root: Path | None = None
) -> Iterator[Connection]:
    """Run a Ray of this process's own, without a dashboard, and remove all trace of it afterwards.

    Raises:
        ClusterError: Ray did not start, nor when it was tried again.
        ClusterRefusedError: `temp_root` makes socket paths too long.
    """
    root = (temp_root or Path(tempfile.gettempdir())).resolve()
    _remove_stale(root)
    # Named after this process, so that a later run can tell what a killed one left behind.
    temp_dir = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    try:
        require_short(temp_dir / SESSION_FOLDER)
        token_path = temp_dir / "token"
        write_private(token_path, _token())
        # Ray turns authentication on by itself in `ray.init`, and says so in a warning that asks for nothing.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        with _variables(settings(token_path)):
            _start(temp_dir, num_cpus, num_gpus)
            try:
                yield Connection(_gcs_address(), embedded=True, dashboard_url=None)
            finally:
                ray.shutdown()
    finally:
        _remove(temp_dir)


def _start(temp_dir: Path, num_cpus: int | None, num_gpus: int | None) -> None:
    """Start an embedded Ray; once more where it does not come up in time, as on a machine that is busy.

    Raises:
        ClusterError: Nor did it then.
    """
    for last in (False, True):
        # What a start that failed leaves running is told by it: Ray forgets its handles.
        marker = secrets.token_hex(8)
        try:
            with _variables({HEAD_MARKER: marker}):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    logging_level=logging.WARNING,
                    _temp_dir=str(temp_dir / SESSION_FOLDER),
                )
            return
        except Exception as error:
            ray.shutdown()
            processes.end(marker, (), grace_s=_END_GRACE_S)
            if last:
                raise ClusterError(
                    f"an embedded Ray did not start in {temp_dir}, nor when it was tried again: {said(error)}. The "
                    f"machine has {machine_load()}, and Ray gives its daemons {_START_S} s to come up: let other work "
                    "end, or give this more cores, and run the same command again"
                ) from error
            logger.warning("Ray did not start (%s); the machine has %s; trying once more", said(error), machine_load())


def require_resources(needed: Mapping[str, float], timeout_s: float) -> None:
    """Wait until Ray could hand out `needed` at once.

    Args:
        needed: Amount of each resource, e.g. `{"CPU": 4, "GPU": 1}`.
        timeout_s: How long other jobs may keep them.

    Raises:
        ClusterRefusedError: The cluster has not so many, or not free ones within `timeout_s`.
    """
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if _lacks(needed, total):
        raise ClusterRefusedError(
            f"the run needs {_amounts(needed)} and this Ray has {_amounts(needed, total)} in all; ask for fewer "
            "(memory.optimizer_actors, train.device), or start the head with more (--num-cpus)"
        )
    deadline = time.monotonic() + timeout_s
    while _lacks(needed, available := ray.available_resources()):  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise ClusterRefusedError(
                f"the run needs {_amounts(needed)}; of {_amounts(needed, total)} only {_amounts(needed, available)} "
                f"were free within {timeout_s:.0f} s: another job holds the rest (`python -m cluster.head status`)"
            )
        time.sleep(_POLL_S)


def _lacks(needed: Mapping[str, float], present: Mapping[str, float]) -> bool:
    return any(amount > present.get(name, 0.0) for name, amount in needed.items())


def _amounts(needed: Mapping[str, float], present: Mapping[str, float] | None = None) -> str:
    amounts = needed if present is None else {name: present.get(name, 0.0) for name in needed}
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _where_ray_goes(head: HeadAddress) -> HeadAddress:
    """For a loopback address Ray takes the machine's, unless it is told as `cluster.head env` does to stay on it.

    A head of `cluster.head up` does not listen there, and Ray would try for many minutes.
    """
    return HeadAddress(resolve_ip_for_localhost(head.host), head.port)


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _url(dashboard_url: str | None) -> str | None:
    return f"http://{dashboard_url}" if dashboard_url else None


@functools.cache
def _token() -> str:
    """The token of every embedded Ray of this process: Ray reads it once a process."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for Ray's daemons, which inherit them, and put the old ones back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _remove(temp_dir: Path) -> None:
    """Remove a session directory, into which daemons that are going down may still write."""
    deadline = time.monotonic() + _REMOVE_S
    while temp_dir.exists() and time.monotonic() < deadline:
        shutil.rmtree(temp_dir, ignore_errors=True)
    if temp_dir.exists():
        logger.warning("%s could not be removed; remove it by hand", temp_dir)


def _remove_stale(root: Path) -> None:
    """Remove what embedded Rays of dead processes of this user left; their daemons died with them."""
    for path in root.glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)
