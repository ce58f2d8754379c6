"""Looks at a running job as a user does, from beside it, and writes what it saw as JSON to standard output.

    watch_job.py DASHBOARD_URL METRICS_FILE

A program of its own, because a process can be the driver of one Ray only. It needs the variables of the head's clients.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.state import list_actors, list_tasks

GIVE_UP_S = 120.0
GAUGES = ("megatrain_step", "megatrain_loss", "megatrain_tokens_per_s")


def main(dashboard_url: str, metrics: Path) -> None:
    """Wait for the job's first steps, then collect."""
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5)
    ray.init(logging_level=logging.ERROR)
    alive = list_actors(address=dashboard_url, filters=[("state", "=", "ALIVE")])
    actors = [actor.name for actor in alive]
    gauges = wait_for(read_gauges)
    timeline = wait_for(read_timeline)
    tasks = list_tasks(address=dashboard_url, filters=[("name", "=", "forward[3]")], limit=5)
    seen = {
        "actors": actors,
        "gauges": gauges,
        "timeline": timeline,
        "tasks": [task.func_or_class_name for task in tasks],
    }
    sys.stdout.write(json.dumps(seen))


def wait_for(answer: Callable[[], Any]) -> Any:
    """Ask until there is an answer."""
    deadline = time.monotonic() + GIVE_UP_S
    while not (found := answer()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{answer} had no answer within {GIVE_UP_S:.0f} s")
        time.sleep(0.2)
    return found


def read_gauges() -> dict[str, float] | None:
    """Every gauge of ours that the node exports for Prometheus, by name; None until all of GAUGES are there."""
    node = ray.nodes()[0]  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [re.match(r'ray_(megatrain_\w+)\{.*run="observed".*\} (\S+)$', line) for line in lines]
    gauges = {match[1]: float(match[2]) for match in found if match}
    return gauges if all(name in gauges for name in GAUGES) else None


def read_timeline() -> list[tuple[str, float, float]] | None:
    """Name, begin and end in microseconds of every operation of `ray timeline`; None until updates are among them."""
    events = [event for event in ray.timeline() if event.get("cat", "").startswith("task::")]
    named = [(event["cat"].removeprefix("task::"), event["ts"], event["ts"] + event["dur"]) for event in events]
    return named if any(name == "update[3]" for name, _, _ in named) else None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
