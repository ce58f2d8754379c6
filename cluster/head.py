"""One local Ray head with the right settings: token authentication, loopback dashboard, no memory monitor.

    python -m cluster.head up | down | status | env

It runs beside any other Ray of this machine and stops only what it started.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.command_line import CommandParser, count_to, not_negative, port
from cluster.dashboard import Dashboard
from cluster.environment import JOB_STOP_WAIT_S, client_environment, left_over, state_directory
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.lifecycle import HeadSettings, live_head, start, stop
from cluster.quantities import amount
from cluster.state import HeadState, StateDirectory

MOST_CPUS = 10_000
"""More than any machine has; Ray starts a worker for each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 refused, 3 no head for `status` and `env`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    directory = StateDirectory(state_directory())
    try:
        if options.command == "up":
            return parser.printed(_up(directory, options))
        if options.command == "down":
            return _down(directory, options.job_grace_s)
        state = live_head(directory)
        if state is None:
            print(f"no head is up ({directory.path}); start one with `python -m cluster.head up`", file=sys.stderr)
            return 3
        return parser.printed(_env(state) if options.command == "env" else _status(state, as_json=options.json))
    except (ClusterRefusedError, OSError) as error:
        return parser.refuse(error)
    except ClusterError as error:
        return parser.fail(error)


def describe(state: HeadState) -> str:
    """What a user wants to know of a head that has come up."""
    return "\n".join(
        [
            f"Ray head     {state.address}",
            f"dashboard    {state.dashboard_url}",
            f"token        in {state.token_path} (the dashboard asks for it)",
            "submit       python -m cluster.submit -- python -m tasks.train RECIPE.toml",
            'or           eval "$(python -m cluster.head env)"',
            "             ray job submit --working-dir . -- python -m tasks.train RECIPE.toml",
            "timeline     python -m cluster.timeline",
            "stop         python -m cluster.head down",
        ]
    )


def _parser() -> CommandParser:
    parser = CommandParser("cluster.head", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_SubcommandParser)
    up = commands.add_parser("up", help="start the head")
    up.add_argument("--port", type=port, metavar="PORT", help="port of the head (6379 where free)")
    up.add_argument(
        "--dashboard-port", type=port, metavar="PORT", help="port of the dashboard on 127.0.0.1 (8265 where free)"
    )
    up.add_argument(
        "--temp-dir",
        type=Path,
        metavar="DIR",
        help="where Ray keeps sessions and logs (the system's temporary directory)",
    )
    up.add_argument("--num-cpus", type=count_to(MOST_CPUS), metavar="N", help="CPUs that Ray may hand out (all)")
    up.add_argument("--json", action="store_true", help="print the addresses as JSON")
    down = commands.add_parser("down", help="stop the head, and nothing else")
    down.add_argument(
        "--job-grace-s",
        type=not_negative,
        metavar="S",
        default=float(JOB_STOP_WAIT_S),
        help=f"seconds that running jobs get to finish their step and save ({JOB_STOP_WAIT_S})",
    )
    status = commands.add_parser("status", help="address, dashboard, resources and jobs")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    commands.add_parser("env", help="print the variables that plain `ray` commands need, for a shell's eval")
    return parser


class _SubcommandParser(CommandParser):
    """Of `up`, `down`, ..., which argparse makes itself."""

    def __init__(self, prog: str | None = None) -> None:
        super().__init__("cluster.head", None, prog)


def _up(directory: StateDirectory, options: argparse.Namespace) -> int:
    settings = HeadSettings(options.port, options.dashboard_port, options.temp_dir, options.num_cpus)
    state = start(directory, settings, _say)
    if options.json:
        print(json.dumps({"address": state.address, "dashboard_url": state.dashboard_url}))
    else:
        print(describe(state))
    return 0


def _down(directory: StateDirectory, job_grace_s: float) -> int:
    state = directory.load()
    stopped = stop(directory, job_grace_s=job_grace_s, say=_say)
    print("the head is down" if stopped else "no head was up")
    if state is not None and (
        names := left_over(
            os.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
        )
    ):
        print(f"this shell still points at it; run\n  unset {' '.join(names)}")
    return 0


def _status(state: HeadState, *, as_json: bool) -> int:
    dashboard = Dashboard(state)
    node, jobs = dashboard.node(), dashboard.jobs()
    if as_json:
        print(
            json.dumps(
                {
                    "address": state.address,
                    "dashboard_url": state.dashboard_url,
                    "metrics_url": node.metrics_url,
                    "resources": node.resources,
                    "jobs": [
                        {"id": job.submission_id, "status": job.status, "entrypoint": job.entrypoint} for job in jobs
                    ],
                }
            )
        )
        return 0
    print(describe(state))
    print(
        f"metrics      {node.metrics_url or 'none'} (for Prometheus, without the token: ray_megatrain_loss and others)"
    )
    print(f"resources    {', '.join(amount(*resource) for resource in sorted(node.resources.items()))}")
    for job in jobs:
        print(f"job          {job.submission_id} {job.status} {job.entrypoint}")
    return 0


def _env(state: HeadState) -> int:
    variables = client_environment(
        os.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
    )
    # A token in the environment would win over the file.
    print("unset RAY_AUTH_TOKEN")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
