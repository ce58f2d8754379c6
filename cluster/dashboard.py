"""A few questions to a head's dashboard over HTTP, without importing Ray: what `up`, `down` and `status` need."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError, said
from cluster.exit_status import command_of
from cluster.session import Session
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


@dataclass(frozen=True, slots=True)
class Node:
    """What a head has and where it tells of itself."""

    resources: dict[str, float]
    """Total of each kind, e.g. CPU and GPU in units, memory in bytes."""
    metrics_url: str | None
    """Where Prometheus reads, without a token; None where Ray exports none."""


@dataclass(frozen=True)
class Dashboard:
    """The dashboard of a head."""

    state: HeadState

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when jobs can be submitted: the dashboard answers, and the agent that starts them has its port.

        The dashboard refuses jobs where the agent comes 10 s late. That something listens on a port says nothing of it:
        it may be a stranger's, and without a port of its own the agent goes on, and starts no job.

        Args:
            timeout_s: How long both may take.

        Raises:
            ClusterError: Not within `timeout_s`, or the agent says that it will have no port.
        """
        session = Session(self.state.temp_dir)
        deadline = time.monotonic() + timeout_s
        while True:
            agent_port = session.agent_port()
            if agent_port is not None and agent_port < 0:
                raise ClusterError(f"Ray's agent, which starts jobs, got no port; its log is in {session.logs}")
            try:
                self._request("GET", "/api/version")
                if agent_port is not None:
                    return
                why = "Ray's agent, which starts jobs, has no port yet"
            except ClusterError as error:
                why = said(error)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{why}. Jobs need both the dashboard and its agent; their logs are in {session.logs}"
                )
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

    def node(self) -> Node:
        """The one node that a head is."""
        answer = self._request("GET", "/api/v0/nodes?detail=1")
        alive = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
        if not alive:
            raise ClusterError("the head has no node that is alive")
        total = alive[0]["resources_total"].items()
        resources = {name: amount for name, amount in total if not name.startswith("node:")}
        port = Session(self.state.temp_dir).metrics_port()
        metrics_url = None if port is None or port < 0 else f"http://{alive[0]['node_ip']}:{port}/metrics"
        return Node(resources, metrics_url)

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
            raise ClusterError(f"{method} {url} was not answered: {said(error)}") from error
