"""Every environment variable that a Ray head, its clients and its jobs get: one place, pure functions.

Ray reads `RAY_*` variables when it is imported (drivers) or when its daemons start (head): they are set before either.
"""

from __future__ import annotations

import os
import sys
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

JOB_STOP_WAIT_S = 120
"""Ray kills a stopped job's driver after 3 s by default: too soon for the step at work and its checkpoint."""

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
    environ: Mapping[str, str], *, marker: str, token_path: Path, interpreter: str = sys.executable
) -> dict[str, str]:
    """Environment of `ray start --head`: the caller's, without what would point Ray at another cluster.

    Jobs inherit it, and `ray job submit -- python` takes `python` from its PATH: this interpreter's directory is first.
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
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_WAIT_S),
            "PATH": os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH", os.defpath)]),
            HEAD_MARKER: marker,
        }
    )


def client_environment(
    environ: Mapping[str, str], *, address: str, dashboard_url: str, token_path: Path
) -> dict[str, str]:
    """What a client of the head needs beside its own environment: `ray job submit`, `ray status`, `ray.init`."""
    return {
        "RAY_ADDRESS": address,
        "RAY_API_SERVER_ADDRESS": dashboard_url,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
    } | no_proxy(environ)


def no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Exempt the loopback from proxies: everything here talks to 127.0.0.1, where a proxy answers in Ray's name."""
    present = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in present.split(",") if host]
    value = ",".join(hosts + [host for host in _LOOPBACK if host not in hosts])
    return {"no_proxy": value, "NO_PROXY": value}
