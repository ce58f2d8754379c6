"""A job that a head would kill before it can save is told so."""

from __future__ import annotations

from cluster.environment import JOB_STOP_WAIT_S
from cluster.job_stop import JOB_VARIABLE, WAIT_VARIABLE, short_stop

JOB = {JOB_VARIABLE: "{}"}


def test_a_head_that_waits_too_short_is_noted_with_what_to_set() -> None:
    assert "kills a job 3 s after" in (short_stop(JOB) or "")
    for wait in ("10", "soon"):
        note = short_stop(JOB | {WAIT_VARIABLE: wait})
        assert note is not None and f"{WAIT_VARIABLE}={JOB_STOP_WAIT_S}" in note


def test_nothing_is_said_outside_a_job_and_where_the_head_waits() -> None:
    assert short_stop({}) is None
    assert short_stop(JOB | {WAIT_VARIABLE: str(JOB_STOP_WAIT_S)}) is None
