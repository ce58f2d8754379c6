"""Writes what the head's processes did in time, for ui.perfetto.dev or chrome://tracing.

    python -m cluster.timeline [--out FILE]

The events are those of `ray timeline`, which labels an operation by its method alone (`forward`) and its row by a hash.
Here it has the name it was submitted under (`forward[17]`), in the row of its actor and method.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.command_line import CommandParser
from cluster.environment import client_environment, state_directory
from cluster.errors import ClusterError, ClusterRefusedError, OutputRefusedError, said
from cluster.lifecycle import live_head
from cluster.output_file import OutputFile
from cluster.state import HeadState, StateDirectory

_TASK = "task::"
_MOST = 10_000
"""Actors and workers that Ray lists at once."""

Event = dict[str, Any]
"""Of the Chrome trace format; its keys vary by kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 for a failure, 2 for a refusal."""
    parser = CommandParser("cluster.timeline", __doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("timeline.json"), help="file to write (timeline.json)"
    )
    options = parser.parse_args(arguments)
    try:
        state = live_head(StateDirectory(state_directory()))
        if state is None:
            raise ClusterRefusedError("no head is up; start one with `python -m cluster.head up`")
        output = OutputFile.at(options.out)
        events = relabelled(*_ask(state))
        output.write(json.dumps(events).encode())
    except (ClusterRefusedError, OutputRefusedError, OSError) as error:
        return parser.refuse(error)
    except ClusterError as error:
        return parser.fail(error)
    print(f"{len(events)} events in {options.out.absolute()}; open it in https://ui.perfetto.dev")
    return 0


def relabelled(events: Iterable[Event], actors: Mapping[str, str]) -> list[Event]:
    """Give operations their full name, and rows that of their actor and method.

    Args:
        events: Of `ray.timeline()`: complete events whose category is `task::NAME` and whose thread is `worker:ID`.
        actors: Name of the actor by id of its worker; what other workers and drivers did keeps its row.
    """
    named = []
    for event in events:
        actor = actors.get(str(event.get("tid", "")).partition(":")[2])
        category = str(event.get("cat", ""))
        changes: Event = {}
        if category.startswith(_TASK):
            changes["name"] = category.removeprefix(_TASK)
            if actor is not None:
                # A row a method: calls of one actor overlap, and viewers draw only nested events in one row.
                changes["tid"] = f"{actor}: {event['name']}"
        elif actor is not None:
            changes["tid"] = f"{actor}: calls"
        named.append(event | changes)
    return named


def _ask(state: HeadState) -> tuple[list[Event], dict[str, str]]:
    """Ray's timeline, and the actors' names by worker."""
    # Before Ray is imported, because that is when it reads them; RAY_AUTH_TOKEN would win over the file.
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(
        client_environment(
            os.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
        )
    )
    import ray
    from ray.util.state import list_actors, list_workers

    try:
        ray.init(address=state.address, logging_level=logging.ERROR)
        try:
            events = ray.timeline()
            actors = list_actors(address=state.dashboard_url, limit=_MOST)
            workers = list_workers(address=state.dashboard_url, limit=_MOST)
        finally:
            ray.shutdown()
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"the head at {state.address} did not answer: {said(error)}") from error
    by_pid = {actor.pid: f"{actor.name or actor.class_name} ({actor.pid})" for actor in actors}
    names = {worker.worker_id: by_pid[worker.pid] for worker in workers if worker.pid in by_pid}
    return list(events or []), names


if __name__ == "__main__":
    sys.exit(main())
