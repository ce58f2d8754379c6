"""Whose an error is, told from the calls that the coordinator has submitted last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.call_states import CallState, failed
from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.messages import Batch
from support.inline import Case
from support.tiny import tiny_config

FAILING = "snapshot[2]"


@dataclass(frozen=True)
class Ref:
    """Stands for the result of a call: an error where the call has one of its own, or was given one."""

    failed: bool


class Actor:
    """Stands for the handle of an actor whose calls all end at once."""

    def __getattr__(self, method: str) -> Any:
        def call(name: str, *arguments: object) -> Ref | tuple[Ref, Ref]:
            has_error = any(isinstance(each, Ref) and each.failed for each in arguments)
            ref = Ref(has_error or name == FAILING)
            return (ref, ref) if method == "norm" else ref

        return SimpleNamespace(
            options=lambda name: SimpleNamespace(remote=lambda *arguments: call(name, *arguments)),
        )


def test_a_snapshot_that_fails_three_steps_later_is_not_taken_for_an_error_of_who_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are in flight while the updates before them wait for files that a checkpoint copies."""
    monkeypatch.setattr("ray.put", lambda value: Ref(failed=False))
    monkeypatch.setattr("pipeline.coordinator._state", lambda ref: CallState.FAILED if ref.failed else CallState.DONE)
    _, schedule = Case(tiny_config("llama"), state_on_nvme=(1, 2, 3)).plans()
    actor = Actor()
    crew = SimpleNamespace(compute=actor, prefetcher=actor, optimizers=[actor])
    coordinator = Coordinator(cast("Crew", crew), schedule, applied_steps=0)
    for step in range(7, 11):
        coordinator.submit(step, cast("Batch", None), tmp_path if step == 7 else None)
    assert str(failed(coordinator.calls())) == f"{FAILING} of step 7"
