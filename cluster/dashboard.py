"""A few questions to a head's dashboard over HTTP, without importing Ray: what `up`, `down` and `status` need."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from cluster.environment import SESSION_FOLDER
from cluster.errors import ClusterError
from cluster.exit_status import command_of
from cluster.state import HeadState

_REQUEST_S = 10.0
_POLL_S = 0.2
_FINISHED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the head lists it."""

    submission_id: str
    status: str
    entrypoint: str
    """Its command."""

    @property
    def finished(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in _FINISHED


def _knock(port: int) -> None:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_REQUEST_S).close()
    except OSError as error:
        raise ClusterError(f"nothing answers yet on port {port}, where jobs are started: {error}") from error


@dataclass(frozen=True)
class Dashboard:
    """The dashboard of a head."""

    state: HeadState

    def wait_until_ready(self, agent_port: int, timeout_s: float) -> None:
        """Return when jobs can be submitted.

        Args:
            agent_port: Of the process that starts jobs; the dashboard refuses jobs where it comes 10 s late.
            timeout_s: How long both may take.

        Raises:
            ClusterError: Not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._request("GET", "/api/version")
                _knock(agent_port)
                return
            except ClusterError as error:
                if time.monotonic() > deadline:
                    logs = self.state.temp_dir / SESSION_FOLDER / "session_latest" / "logs"
                    raise ClusterError(f"{error}. Jobs need the dashboard; its log is in {logs}") from error
                time.sleep(_POLL_S)

    def jobs(self) -> list[Job]:
        """Submitted jobs, finished ones too."""
        return [
            Job(name, job["status"], command_of(job["entrypoint"], self.state.temp_dir, name))
            for job in self._request("GET", "/api/jobs/")
            if (name := job.get("submission_id"))
        ]

    def stop_job(self, submission_id: str) -> None:
        """Ask a job to stop; returns before it has."""
        self._request("POST", f"/api/jobs/{submission_id}/stop")

    def resources(self) -> dict[str, float]:
        """Total of each resource kind, e.g. CPU and GPU in units, memory in bytes."""
        answer = self._request("GET", "/api/v0/nodes?detail=1")
        totals: dict[str, float] = {}
        for node in answer["data"]["result"]["result"]:
            if node["state"] == "ALIVE":
                for name, amount in node["resources_total"].items():
                    totals[name] = totals.get(name, 0.0) + amount
        return {name: amount for name, amount in totals.items() if not name.startswith("node:")}

    def _request(self, method: str, path: str) -> Any:
        """Send a request and parse its JSON answer; the shape is Ray's."""
        url = self.state.dashboard_url + path
        request = urllib.request.Request(url, method=method)
        try:
            request.add_header("Authorization", f"Bearer {self.state.token()}")
            # No proxy: a proxy cannot reach this machine's loopback.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=_REQUEST_S
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ClusterError(f"{method} {url} was answered with {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise ClusterError(f"{method} {url} was not answered: {error}") from error
