"""Start and stop one Ray head of our own on this machine, beside any other that runs here.

Never calls `ray stop`, which ends every Ray process of the machine.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster import preflight, processes
from cluster.dashboard import Dashboard
from cluster.environment import (
    JOB_STOP_WAIT_S,
    OBJECT_STORE_BYTES,
    SESSION_FOLDER,
    TEMPORARY_FOLDER,
    head_environment,
)
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.exit_status import write_runner
from cluster.load import machine_load
from cluster.state import HeadState, StateDirectory

logger = logging.getLogger(__name__)

_START_S = 120.0
_READY_S = 60.0
_END_GRACE_S = 5.0
_POLL_S = 0.2
_LAST_WORDS_S = 3.0
"""Ray looks for new lines of a job's log every two seconds: who follows it sees its end, before the head goes."""
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What a user may choose of a head."""

    port: int | None = None
    """Of the head; None takes 6379 where free, else another."""
    dashboard_port: int | None = None
    """None takes 8265 where free, else another."""
    temp_root: Path | None = None
    """Where the head makes its own temporary directory; None is the system's."""
    num_cpus: int | None = None
    """CPUs that Ray may hand out; None counts the machine's."""
    object_store_bytes: int = OBJECT_STORE_BYTES


def live_head(directory: StateDirectory) -> HeadState | None:
    """The head of `directory` if it runs."""
    state = directory.load()
    return state if state is not None and state.address and state.alive else None


def start(directory: StateDirectory, settings: HeadSettings, say: Callable[[str], None] = logger.info) -> HeadState:
    """Start a head and return once it takes jobs; once more on other ports where it does not come up.

    Another process may have taken a port since it was found free, and a busy machine may keep Ray's daemons waiting.

    Args:
        directory: Where its state is kept; at most one head lives in one.
        settings: Choices of the user.
        say: Gets one-line messages for the user.

    Raises:
        ClusterRefusedError: A head is up, a port is taken, or the machine lacks something.
        ClusterError: Ray did not start, nor when it was tried again; nothing of it is left then.
    """
    with directory.locked():
        previous = directory.load()
        if previous is not None:
            if previous.alive:
                raise ClusterRefusedError(
                    f"a head is up already at {previous.address or '(starting)'}, dashboard {previous.dashboard_url}; "
                    "use it, or stop it with `python -m cluster.head down`"
                )
            say(f"clearing what a dead head left in {previous.temp_dir}")
            _clear(directory, previous)
        temp_root = (settings.temp_root or Path(tempfile.gettempdir())).expanduser().resolve()
        preflight.require(temp_root)
        for warning in preflight.warnings_of(temp_root, settings.object_store_bytes, os.environ):
            say(f"warning: {warning}")
        ports: preflight.Ports | None = None
        for last in (False, True):
            ports = preflight.choose_ports(settings.port, settings.dashboard_port, avoid=ports)
            try:
                return _start_once(directory, settings, ports, temp_root)
            except ClusterRefusedError:
                raise
            except ClusterError as error:
                if last:
                    raise ClusterError(
                        f"{error}\nThis was the second try. The machine has {machine_load()}: where that is much, let "
                        "other work end and start the head again"
                    ) from error
                lines = str(error).splitlines()
                say(f"warning: {lines[0]} {lines[-1] if len(lines) > 1 else ''}")
                say(f"trying once more on other ports; the machine has {machine_load()}")
        raise AssertionError


def stop(
    directory: StateDirectory, *, job_grace_s: float = JOB_STOP_WAIT_S, say: Callable[[str], None] = logger.info
) -> bool:
    """Stop the head of `directory` and remove all it had on disk. Returns whether there was one.

    Running jobs are asked to stop first and get `job_grace_s` to finish their step and write a checkpoint.

    Raises:
        ClusterRefusedError: Another `up` or `down` is at work.
        ClusterError: A process outlived SIGKILL.
    """
    with directory.locked():
        state = directory.load()
        if state is None:
            return False
        if state.address and state.alive:
            try:
                _stop_jobs(Dashboard(state), job_grace_s, say)
            except ClusterError as error:
                say(f"warning: jobs could not be asked to stop: {error}")
        left = processes.end(state.marker, state.processes, grace_s=_END_GRACE_S)
        if left:
            raise ClusterError(f"processes {sorted(process.pid for process in left)} outlived SIGKILL; try again later")
        _clear(directory, state)
        return True


def _start_once(
    directory: StateDirectory, settings: HeadSettings, ports: preflight.Ports, temp_root: Path
) -> HeadState:
    """Start a head on given ports; nothing of it is left where that fails."""
    temp_dir = Path(tempfile.mkdtemp(prefix="mt-head-", dir=temp_root))
    state = HeadState(
        marker=secrets.token_hex(8),
        address="",
        dashboard_url=f"http://{_HOST}:{ports.dashboard}",
        temp_dir=temp_dir,
        token_path=directory.token_path,
    )
    # Recorded before anything runs: whatever happens now, the next `up` or `down` finds what to end and remove.
    directory.save(state)
    try:
        preflight.require_short(temp_dir / SESSION_FOLDER)
        directory.write_token()
        (temp_dir / TEMPORARY_FOLDER).mkdir()
        write_runner(temp_dir)
        _run_ray_start(state, settings, ports)
        state = replace(state, address=f"{_HOST}:{ports.gcs}", processes=tuple(processes.processes_of(state.marker)))
        directory.save(state)
        Dashboard(state).wait_until_ready(_READY_S)
    except BaseException:
        processes.end(state.marker, state.processes, grace_s=_END_GRACE_S)
        _clear(directory, state)
        raise
    return state


def _run_ray_start(state: HeadState, settings: HeadSettings, ports: preflight.Ports) -> None:
    """Run `ray start --head` of this interpreter's environment, detached from the caller's terminal."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
    command += [f"--port={ports.gcs}", f"--temp-dir={state.temp_dir / SESSION_FOLDER}"]
    command += [f"--dashboard-host={_HOST}", f"--dashboard-port={ports.dashboard}", "--include-dashboard=true"]
    command += [f"--ray-client-server-port={ports.client_server}"]
    command += [f"--object-store-memory={settings.object_store_bytes}"]
    # 0: workers and the agent bind free ports. A fixed range would meet that of another head, and a port that was found
    # free may be taken when the agent, which Ray starts last, comes to it.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if settings.num_cpus is not None:
        command.append(f"--num-cpus={settings.num_cpus}")
    environ = head_environment(os.environ, marker=state.marker, token_path=state.token_path, temp_dir=state.temp_dir)
    log_path = state.temp_dir / "start.log"
    with log_path.open("wb") as log:
        try:
            # A session of its own, so that a Ctrl+C in the caller's terminal does not reach the daemons.
            completed = subprocess.run(
                command,
                env=environ,
                cwd=state.temp_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=_START_S,
                check=False,
            )
            outcome = f"ended with status {completed.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"did not end within {_START_S:.0f} s"
    if outcome != "ended with status 0":
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
        raise ClusterError(f"`ray start --head` on ports {ports.gcs} and {ports.dashboard} {outcome}:\n{tail}")


def _stop_jobs(dashboard: Dashboard, grace_s: float, say: Callable[[str], None]) -> None:
    """Ask running jobs to stop, and wait for them."""
    running = stopped = [job for job in dashboard.jobs() if not job.finished]
    for job in running:
        say(f"stopping job {job.submission_id} ({job.entrypoint}); it may take up to {grace_s:.0f} s")
        dashboard.stop_job(job.submission_id)
    deadline = time.monotonic() + grace_s
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        running = [job for job in dashboard.jobs() if not job.finished]
    for job in running:
        say(f"warning: job {job.submission_id} did not stop within {grace_s:.0f} s and is killed")
    if stopped:
        time.sleep(_LAST_WORDS_S)


def _clear(directory: StateDirectory, state: HeadState) -> None:
    shutil.rmtree(state.temp_dir, ignore_errors=True)
    directory.clear()
