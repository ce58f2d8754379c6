"""A driver without a head gets a Ray of its own that leaves nothing behind; one that asks for too much is told so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import ClusterError, ClusterRefusedError
from cluster.join import connect, require_resources

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.ray

TWICE = """
import os, sys
import ray
from pathlib import Path
from cluster.join import connect

@ray.remote
def seen():
    return os.environ["RAY_memory_monitor_refresh_ms"], os.nice(0)

for _ in range(2):
    with connect(num_cpus=1) as connection:
        assert connection.embedded and connection.dashboard_url is None
        assert ray.get(seen.remote()) == ("0", os.nice(0))
        (session,) = Path(os.environ["TMPDIR"]).glob("mt-*")
        assert (session / "token").stat().st_mode & 0o777 == 0o600
assert "RAY_AUTH_TOKEN_PATH" not in os.environ
print("both ran")
"""


NOT_AT_ONCE = """
import ray
from pathlib import Path
from cluster.errors import ClusterError
from cluster.join import connect

def daemons():
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name != "self")
    return sum(b"gcs_server" in line and os.environ["TMPDIR"].encode() in line for line in lines)

import os
services, answers = ray._private.services, []
get_node = services.get_node

def late(*arguments, **named):
    answers.append(daemons())
    if len(answers) <= LATE:
        raise Exception("The current node timed out during startup.")
    return get_node(*arguments, **named)

services.get_node = late
try:
    with connect(num_cpus=1):
        print("started", daemons(), "after", len(answers) > 1)
except ClusterError as error:
    print("failed:", error)
print("left", daemons())
"""


@pytest.fixture
def temp() -> Iterator[Path]:
    """A temporary directory with a short name, for Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="j-") as name:
        yield Path(name)


def test_embedded_rays_one_after_another_leave_no_file(temp: Path, tmp_path: Path) -> None:
    home = tmp_path  # fresh, so that a token left there would show
    stale = temp / "mt-4194305-x"  # above the highest pid that Linux gives
    stale.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"TMPDIR": str(temp), "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        [sys.executable, "-c", TWICE], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert "both ran" in ran.stdout, ran.stderr
    assert list(temp.iterdir()) == []
    assert not (home / ".ray" / "auth_token").exists()


@pytest.mark.parametrize("late", [1, 2])
def test_a_ray_that_does_not_come_up_in_time_is_tried_once_more_and_then_the_load_is_named(
    late: int, temp: Path, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"TMPDIR": str(temp), "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    program = NOT_AT_ONCE.replace("LATE", str(late))
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert "trying once more" in ran.stderr and " cores" in ran.stderr
    if late == 1:
        assert "started 1 after True" in ran.stdout, ran.stderr
    else:
        assert "failed: " in ran.stdout and "timed out during startup. The machine has a load of " in ran.stdout
    assert "left 0" in ran.stdout, "nothing of a start that failed goes on running"
    assert list(temp.iterdir()) == []


def test_a_head_that_listens_where_ray_would_not_look_for_it_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of `cluster.head up` without the variables of `cluster.head env`."""
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.2")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match=r"take its variables from `python -m cluster\.head env`"),
            connect(address),
        ):
            pass


def test_more_than_the_cluster_has_is_refused_at_once_with_both_amounts(ray_local: None) -> None:
    with pytest.raises(ClusterRefusedError, match="needs 2 GPU and this Ray has 0 GPU in all"):
        require_resources({"GPU": 2}, timeout_s=600)


def test_what_another_job_holds_is_waited_for_and_then_refused(ray_local: None) -> None:
    import ray

    @ray.remote(num_cpus=3)
    class Holder:
        def ready(self) -> bool:
            return True

    holder = Holder.remote()
    assert ray.get(holder.ready.remote())
    require_resources({"CPU": 1}, timeout_s=60)
    deadline_s = time.monotonic() + 60.0
    while ray.available_resources()["CPU"] > 1.0:  # Ray tells of what it gave a moment later
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    with pytest.raises(ClusterRefusedError, match=r"needs 3 CPU; of 4 CPU only 1 CPU were free within 0 s"):
        require_resources({"CPU": 3}, timeout_s=0)
    ray.kill(holder)
    require_resources({"CPU": 3}, timeout_s=60)
