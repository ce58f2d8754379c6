"""The log of a job is followed to its end whatever becomes of the connection; what printing raises is no lost one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from ray.job_submission import JobStatus

from cluster import submit
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.state import HeadState
from cluster.submit import SubmittedJob, follow


@dataclass
class Client:
    """Of a head that gives a job's log in these tries, a piece at a time, and then its end once."""

    tries: list[list[str | Exception]]
    interrupted: bool = False
    followed: int = 0
    asked: int = 0
    message: str = "why"
    status: JobStatus = JobStatus.FAILED
    exit_code: int | None = 7
    stopped: threading.Event = field(default_factory=threading.Event)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        self.followed += 1
        for piece in self.tries.pop(0):
            if isinstance(piece, Exception):
                raise piece
            yield piece
        if self.interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    def stop_job(self, job_id: str) -> bool:
        self.stopped.set()
        raise requests.ConnectionError("the head is gone")

    def get_job_info(self, job_id: str) -> Any:
        if self.interrupted:
            assert self.stopped.wait(60)
        self.asked += 1
        if self.asked > 1:
            raise requests.ConnectionError("the head is gone")
        return SimpleNamespace(status=self.status, message=self.message, driver_exit_code=self.exit_code)


def job_of(client: Client, status: int | None = None) -> SubmittedJob:
    return SubmittedJob(client, "some", lambda: status)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_RETRY_S", 0.0)


def test_a_lost_connection_repeats_nothing_and_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client([["ab", RuntimeError("lost")], [requests.ConnectionError("lost")], ["a", "bc", "d\n"]])
    assert follow(job_of(client)) == 7
    said = capsys.readouterr()
    assert said.out == "abcd\n" and said.err == "job some FAILED: why\n" and client.followed == 3


def test_a_head_that_answers_no_more_is_an_error_in_the_end() -> None:
    client = Client([["a"]] + [[OSError("lost")]] * (submit._RETRIES + 1))
    client.asked = 1
    with pytest.raises(ClusterError, match="no longer answers"):
        follow(job_of(client))


def test_a_stopped_job_ends_with_the_status_that_its_command_had_which_the_head_does_not_know() -> None:
    for status, expected in ((3, 3), (0, 0), (None, 1)):
        client = Client([["some\n"]], status=JobStatus.STOPPED, exit_code=None)
        assert follow(job_of(client, status)) == expected


def test_a_job_that_is_known_to_have_ended_is_not_waited_for_when_its_head_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = Client([["a\n"]] + [[OSError("lost")]] * submit._RETRIES, asked=1)
    assert follow(job_of(client, 3)) == 3
    assert "ended, and its head is gone" in capsys.readouterr().err and len(client.tries) > 20


CITED = "exit code 7, last available logs (truncated to 20,000 chars):\n"


@pytest.mark.parametrize(
    ("log", "cited", "unseen"),
    [
        ("one\ntwo\n", "one\ntwo\n", ""),
        ("one\ntwo\n", "two\r\n", ""),
        ("one\ntwo\n", "wo", ""),
        ("one\ntwo\n", "one\ntwo\nthree\n", "three\n"),
        ("", "one\n", "one\n"),
    ],
)
def test_of_what_ray_cites_of_the_log_only_what_was_not_printed_is(
    log: str, cited: str, unseen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(job_of(Client([[log]], message=CITED + cited))) == 7
    said = capsys.readouterr()
    assert said.out == log + unseen and said.err == "job some FAILED: exit code 7\n"


def test_what_printing_raises_is_not_taken_for_a_head_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    client = Client([["some\n"]])
    with os.fdopen(writable, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            follow(job_of(client))
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writable)  # for what is left in the buffer
    assert client.followed == 1


def test_a_head_that_goes_while_its_job_is_stopped_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client([["some\n"]], interrupted=True)
    assert follow(job_of(client)) == 7
    assert client.stopped.is_set() and "stopping the job" in capsys.readouterr().err


def test_a_command_that_is_no_text_is_refused(tmp_path: Path) -> None:
    state = HeadState("m", "127.0.0.1:1", "http://127.0.0.1:1", tmp_path, tmp_path / "token")
    with pytest.raises(ClusterRefusedError, match=r"\\udcff.* is not UTF-8"):
        submit.submit(state, ["python", "x\udcff.py"], tmp_path)
