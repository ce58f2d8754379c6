"""Submits a command as a job to the head that `cluster.head up` started, follows its log, ends with its status.

    python -m cluster.submit [--no-wait] -- python -m tasks.train RECIPE.toml

Ctrl+C stops the job, which then finishes its step, writes a checkpoint and ends with its own status (3 of
`tasks.train`); what has not ended ten minutes later is killed. A second Ctrl+C leaves it to itself (130). Nothing
changes where nobody reads the log any more (`| head`): the job goes on, and its status comes back when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import working_dir
from cluster.command_line import FAILED, CommandParser
from cluster.environment import client_environment, state_directory
from cluster.errors import ClusterError, ClusterRefusedError, said
from cluster.exit_status import ExitStatus, runner
from cluster.lifecycle import live_head
from cluster.log_text import PrintedLog
from cluster.state import HeadState, StateDirectory

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_RETRY_S = 1.0
_RETRIES = 30
_RETRIES_ENDED = 3
"""Where the job is known to have ended: its head may have gone with it."""
_INTERRUPTED = 130
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the job's exit status, 2 for a refusal, 1 for a failure."""
    parser = CommandParser("cluster.submit", __doc__)
    parser.add_argument("--no-wait", action="store_true", help="print the job's id and leave it to itself")
    parser.add_argument(
        "--working-dir", type=Path, metavar="DIR", default=Path(), help="what the job takes along (here)"
    )
    parser.add_argument("command", nargs="+", help="after `--`: the job's command")
    options = parser.parse_args(arguments)
    try:
        state = live_head(StateDirectory(state_directory()))
        if state is None:
            raise ClusterRefusedError(
                "no head is up to submit to; start one with `python -m cluster.head up`, or run the command directly"
            )
        job = submit(state, options.command, options.working_dir)
        print(f"job {job.submission_id} on {state.dashboard_url}", file=sys.stderr, flush=True)
        return 0 if options.no_wait else follow(job)
    except (ClusterRefusedError, OSError) as error:
        return parser.refuse(error)
    except ClusterError as error:
        return parser.fail(error)


@dataclass(frozen=True)
class SubmittedJob:
    """A job and the client that knows it."""

    client: JobSubmissionClient
    submission_id: str
    exit_status: Callable[[], int | None]
    """Of its command; None before its end, and where it was killed."""


def submit(state: HeadState, command: Sequence[str], directory: Path) -> SubmittedJob:
    """Submit `command` to the head of `state`.

    Args:
        state: A live head.
        command: Program and arguments. A leading `python` means this interpreter. Recipes (`*.toml`) that exist in
            `directory` are named by their absolute path, because paths inside them are relative to where they lie.
        directory: Becomes the job's working directory, as a copy.

    Raises:
        ClusterRefusedError: The directory cannot be taken along, as one that is too large, or the command is no text.
        ClusterError: The head does not answer or refuses the job.
    """
    directory = directory.resolve()
    program = absolute(command, directory)
    try:
        shlex.join(program).encode()
    except UnicodeEncodeError as error:
        raise ClusterRefusedError(
            f"the command {shlex.join(program)!r} is not UTF-8, as what a job gets must be"
        ) from error
    # Before Ray is imported, because that is when it reads them; RAY_AUTH_TOKEN would win over the file.
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(
        client_environment(
            os.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
        )
    )
    # It excludes by itself what is excluded here by name, and warns of each.
    os.environ.setdefault("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", "")
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient
    from requests import RequestException  # part of `ray[default]`, as the client is

    working_dir.check(directory)
    # A dozen lines about ignore files and closed sockets a job; the first two set a level of their own.
    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.WARNING)
    submission_id = f"raysubmit_{secrets.token_hex(8)}"
    exit_status = ExitStatus.expect(state.temp_dir, submission_id)
    try:
        client = JobSubmissionClient(state.dashboard_url)
        client.submit_job(
            entrypoint=shlex.join([*runner(state.temp_dir, submission_id), *program]),
            submission_id=submission_id,
            runtime_env={"working_dir": str(directory), "excludes": list(working_dir.EXCLUDES)},
        )
    except (ConnectionError, RuntimeError, RequestException, RayError) as error:
        raise ClusterError(f"the job could not be submitted to {state.dashboard_url}: {said(error)}") from error
    return SubmittedJob(client, submission_id, exit_status)


def absolute(command: Sequence[str], here: Path) -> list[str]:
    """`command` with this interpreter in place of `python`, and recipes under `here` by their absolute path."""
    program = [sys.executable] if command[0] in {"python", "python3"} else [command[0]]
    arguments = [
        str(here / part) if part.endswith(".toml") and (here / part).is_file() else part for part in command[1:]
    ]
    return program + arguments


def follow(job: SubmittedJob) -> int:
    """Print the log of `job` until it ends; SIGINT and SIGTERM stop the job. Returns its exit status.

    Raises:
        ClusterError: The head no longer answers.
    """
    # The event loop leaves the default handlers behind.
    handlers = {signum: signal.getsignal(signum) for signum in _STOPPING}
    try:
        return asyncio.run(_follow(job))
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


async def _follow(job: SubmittedJob) -> int:
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Future[bool]] = []
    followed = asyncio.ensure_future(_print_log(job))

    def interrupt() -> None:
        if stopping:
            followed.cancel()
            return
        print("stopping the job; once more to leave it to itself", file=sys.stderr, flush=True)
        stopping.append(loop.run_in_executor(None, job.client.stop_job, job.submission_id))

    for signum in _STOPPING:
        loop.add_signal_handler(signum, interrupt)
    try:
        ended = await followed
    except asyncio.CancelledError:
        return _INTERRUPTED
    finally:
        # It may have ended by itself before it could be stopped, or its head be gone: then the log has ended too.
        await asyncio.gather(*stopping, return_exceptions=True)
    if ended is not None and ended.status == "SUCCEEDED":
        return 0
    status = job.exit_status()
    if status is None:
        status = None if ended is None else ended.driver_exit_code
    return FAILED if status is None else status


async def _print_log(job: SubmittedJob) -> JobDetails | None:
    """Print the log to its end and what became of the job, which is returned as far as the head tells it."""
    printed = PrintedLog()
    async for piece in _log(job):
        if isinstance(piece, str):
            print(piece, end="", flush=True)
            printed.add(piece)
            continue
        if piece is None:
            print(f"job {job.submission_id} ended, and its head is gone", file=sys.stderr, flush=True)
        elif piece.status != "SUCCEEDED":
            message, unseen = printed.news(piece.message or "")
            print(unseen, end="", flush=True)
            print(f"job {job.submission_id} {piece.status}: {message}", file=sys.stderr, flush=True)
        return piece
    raise AssertionError


async def _log(job: SubmittedJob) -> AsyncIterator[str | JobDetails | None]:
    """The log to its end, going on where it was after a lost connection, and at last what became of the job.

    That is None where it has ended and the head does not answer any more, as after `cluster.head down`.
    """
    import aiohttp  # part of `ray[default]`, as the client is
    from ray.exceptions import RayError

    known = 0
    failures = 0
    while True:
        seen = 0
        try:
            async for text in job.client.tail_job_logs(job.submission_id):
                new = text[max(0, known - seen) :]
                seen += len(text)
                if new:
                    known += len(new)
                    failures = 0
                    yield new
            details = await asyncio.to_thread(job.client.get_job_info, job.submission_id)
            if details.status.is_terminal():
                yield details
                return
        except (OSError, RuntimeError, aiohttp.ClientError, RayError) as error:
            failures += 1
            if failures > _RETRIES_ENDED and job.exit_status() is not None:
                yield None
                return
            if failures > _RETRIES:
                raise ClusterError(
                    f"the head no longer answers ({said(error)}); job {job.submission_id} may still run: "
                    "see `python -m cluster.head status`"
                ) from error
        await asyncio.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
