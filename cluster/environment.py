"""Every environment variable that a Ray head, its clients and its jobs get: one place, pure functions.

Ray reads `RAY_*` variables when it is imported (drivers) or when its daemons start (head): they are set before either.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HEAD_MARKER = "MEGATRAIN_HEAD"
"""Set to the head's identity in the head and all that descends from it: how `down` knows what is its own."""

STATE = "MEGATRAIN_STATE"
"""Directory of the head's state and token; default `$XDG_STATE_HOME/megatrain` or `~/.local/state/megatrain`."""

OBJECT_STORE_BYTES = 256 << 20
"""Tensors never travel through the object store; names, metrics and token ids fit many times."""

SESSION_FOLDER = "ray"
"""Ray opens its temporary directory to every user (mode 0777): it gets a folder inside a directory of mode 0700."""

TEMPORARY_FOLDER = "tmp"
"""In the head's directory: what its processes and jobs leave in their temporary directory goes with the head."""

JOB_STOP_WAIT_S = 600
"""Ray kills a stopped job's driver after 3 s by default: too soon for the step at work, which takes minutes with big
models, and its checkpoint."""

_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for clusters of this machine alone, which its name hides (2.60): the node's address is 127.0.0.1, and
every port listens there and nowhere else, that of the metrics too, which asks for no token. Without it the node has the
machine's address, whatever it is told. Heads, drivers and tools find the node by it, so that all need it alike."""

_LOOPBACK = ("127.0.0.1", "localhost")


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's head keeps its state."""
    if environ.get(STATE):
        return Path(environ[STATE]).expanduser().resolve()
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "megatrain"


def settings(token_path: Path) -> dict[str, str]:
    """Ray settings common to a head and an embedded cluster.

    Args:
        token_path: File of mode 0600 that holds the token. Ray reads it itself: the token stands in no environment.
    """
    return {
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # The memory monitor counts the arena's shared memory as every actor's own and kills innocent ones.
        "RAY_memory_monitor_refresh_ms": "0",
        # Workers run at nice 15 by default: the optimizer would lose the cores to anything else on the machine.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # After the loss of one actor hundreds of calls fail alike; the driver asks for every result that matters.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        # Calls that `ray timeline` and the dashboard know, 3 KB each; Ray would keep 100,000. A step has some 200.
        "RAY_task_events_max_num_task_in_gcs": "20000",
        # Logs of a component: 3 files of 16 MiB at most.
        "RAY_ROTATION_MAX_BYTES": str(16 << 20),
        "RAY_ROTATION_BACKUP_COUNT": "2",
    }


def head_environment(
    environ: Mapping[str, str], *, marker: str, token_path: Path, temp_dir: Path, interpreter: str = sys.executable
) -> dict[str, str]:
    """Environment of `ray start --head`: the caller's, without what would point Ray at another cluster.

    Jobs inherit it, and `ray job submit -- python` takes `python` from its PATH: this interpreter's directory is first.
    Their temporary directory lies in that of the head, `temp_dir`; what torch compiled for them outlives it.
    """
    cleaned = {
        name: value
        for name, value in environ.items()
        if name
        not in {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "RAY_JOB_CONFIG_JSON_ENV_VAR"}
    }
    return (
        cleaned
        | settings(token_path)
        | no_proxy(environ)
        | _ONE_MACHINE
        | {
            "RAY_AUTH_MODE": "token",
            "TMPDIR": str(temp_dir / TEMPORARY_FOLDER),
            "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR") or _compile_cache(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_WAIT_S),
            "PATH": os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH", os.defpath)]),
            HEAD_MARKER: marker,
        }
    )


def client_environment(
    environ: Mapping[str, str], *, address: str, dashboard_url: str, token_path: Path
) -> dict[str, str]:
    """What a client of the head needs beside its own environment: `ray job submit`, `ray status`, `ray.init`."""
    return _pointing(address, dashboard_url, token_path) | no_proxy(environ)


def left_over(environ: Mapping[str, str], *, address: str, dashboard_url: str, token_path: Path) -> list[str]:
    """Variables of `client_environment` that still point at a head which is gone, unless they are another cluster's."""
    ours = _pointing(address, dashboard_url, token_path)
    set_alike = [name for name, value in ours.items() if environ.get(name) == value]
    return set_alike if any(name in _TELLING for name in set_alike) else []


_TELLING = frozenset({"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"})
"""Those that are one head's alone."""


def _pointing(address: str, dashboard_url: str, token_path: Path) -> dict[str, str]:
    return _ONE_MACHINE | {
        "RAY_ADDRESS": address,
        "RAY_API_SERVER_ADDRESS": dashboard_url,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
    }


def _compile_cache() -> str:
    """Where torch keeps compiled code unless it is told: in the temporary directory, by the user's name."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{name}")


def no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Exempt the loopback from proxies: everything here talks to 127.0.0.1, where a proxy answers in Ray's name."""
    present = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in present.split(",") if host]
    value = ",".join(hosts + [host for host in _LOOPBACK if host not in hosts])
    return {"no_proxy": value, "NO_PROXY": value}
