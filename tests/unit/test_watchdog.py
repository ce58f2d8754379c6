"""A wait is reported once it takes ten times the usual, with where everyone is; the first of a kind gets long."""

from __future__ import annotations

import logging
import threading

import pytest

from pipeline.call_states import ACTORS, Call, CallState, at, failed, lost
from pipeline.step.operations import Key, Op
from pipeline.watchdog import FIRST_S, LEAST_S, Patience
from tasks.vigil import Vigil

DONE, FAILED, PENDING = CallState.DONE, CallState.FAILED, CallState.PENDING


def test_the_first_wait_of_a_kind_gets_minutes_and_later_ones_ten_times_the_median() -> None:
    patience = Patience()
    assert patience.limit_s("step") == FIRST_S
    for seconds in (400.0, 7.0, 8.0):  # the first one compiled
        patience.took("step", seconds)
    assert patience.limit_s("step") == 80.0
    assert patience.limit_s("evaluation") == FIRST_S


def test_short_steps_are_not_reported_for_a_pause_of_the_machine() -> None:
    patience = Patience()
    patience.took("step", 0.01)
    assert patience.limit_s("step") == LEAST_S


def test_a_wait_past_its_limit_is_reported_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    spoken = threading.Semaphore(0)

    def report() -> str:
        spoken.release()
        return "compute: at forward[3] of step 7"

    patience = Patience(factor=1.0, least_s=0.01)
    patience.took("step", 0.01)
    with caplog.at_level(logging.WARNING), Vigil(report, patience) as vigil, vigil.over("step"):
        assert spoken.acquire(timeout=60) and spoken.acquire(timeout=60)
    assert "waiting for the step since" in caplog.text
    assert "compute: at forward[3] of step 7" in caplog.text
    assert not any(thread.name == "vigil" for thread in threading.enumerate())


def test_a_report_that_fails_once_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    spoken = threading.Semaphore(0)

    def report() -> str:
        spoken.release()
        raise ConnectionError("Ray does not answer")

    patience = Patience(factor=1.0, least_s=0.01)
    patience.took("step", 0.01)
    with caplog.at_level(logging.WARNING), Vigil(report, patience) as vigil, vigil.over("step"):
        assert spoken.acquire(timeout=60) and spoken.acquire(timeout=60)
    assert "waiting for the step since" in caplog.text and "Ray does not answer" in caplog.text


def test_waits_within_their_limit_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Vigil(lambda: "never") as vigil:
        for _ in range(100):
            with vigil.over("step"):
                pass
    assert caplog.text == ""


def call(op: Op, layer: int, state: CallState, *after: tuple[int, Key], step: int = 7) -> Call:
    kind = ACTORS[op]
    return Call(step, Key(op, layer), "optimizer-0" if kind == "optimizer" else kind, state, after)


def test_an_actor_is_at_its_first_call_that_waits_for_nothing_more() -> None:
    forward = Key(Op.FORWARD, 1)
    calls = [
        call(Op.FORWARD, 0, DONE),
        call(Op.FORWARD, 1, PENDING, (7, Key(Op.FORWARD, 0))),
        call(Op.FORWARD, 2, PENDING, (7, forward)),
        call(Op.UPDATE, 1, PENDING, (7, forward)),
        call(Op.LOAD_STATE, 1, DONE),
    ]
    assert at(calls, "compute") == "at forward[1] of step 7"
    assert at(calls, "optimizer-0") == "waiting to do update[1] of step 7, for forward[1] of step 7 (compute)"
    assert at(calls, "prefetcher") == "idle"


def test_a_dead_actor_was_lost_at_its_first_call_without_a_result() -> None:
    calls = [call(Op.FORWARD, 0, DONE), call(Op.FORWARD, 1, FAILED), call(Op.BACKWARD, 1, FAILED)]
    assert str(lost(calls, "compute")) == "forward[1] of step 7"
    assert lost(calls, "prefetcher") is None
    assert str(call(Op.EVALUATE, -1, PENDING, step=-1)) == "evaluate of an evaluation"


def test_an_error_is_of_the_call_that_waited_for_no_failed_one() -> None:
    forward = Key(Op.FORWARD, 1)
    calls = [
        call(Op.UPDATE, 1, FAILED, (7, forward)),
        call(Op.FORWARD, 0, DONE),
        call(Op.FORWARD, 1, FAILED, (7, Key(Op.FORWARD, 0))),
        call(Op.BACKWARD, 1, PENDING, (7, forward)),
    ]
    assert str(failed(calls)) == "forward[1] of step 7"
    assert failed([call(Op.FORWARD, 0, PENDING)]) is None


def test_every_operation_has_an_actor() -> None:
    assert set(ACTORS) == set(Op)
