"""Where every actor of a run is, told from the driver alone: which submitted calls have ended, failed, or are to come.

Asking an actor would not do: one that is stuck does not answer, and that is when the question matters. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pipeline.step.operations import Key, Op

ACTORS = {
    Op.BEGIN: "compute",
    Op.STAGE: "compute",
    Op.FORWARD: "compute",
    Op.HEAD: "compute",
    Op.RECOMPUTE: "compute",
    Op.EVALUATE: "compute",
    Op.BACKWARD: "compute",
    Op.OFFLOAD: "compute",
    Op.STORE_SUM: "compute",
    Op.FETCH_SUM: "compute",
    Op.LOSS: "compute",
    Op.NORM: "compute",
    Op.LEND_STATE: "compute",
    Op.UPDATE_ON_DEVICE: "compute",
    Op.RETURN_STATE: "compute",
    Op.UPDATE: "optimizer",
    Op.LOAD_WEIGHTS: "prefetcher",
    Op.LOAD_STATE: "prefetcher",
    Op.STORE_STATE: "prefetcher",
    Op.SNAPSHOT: "prefetcher",
    Op.CAPTURE: "prefetcher",
}
"""Who does what; of the optimizers each does a part."""


class CallState(Enum):
    """What has become of a call."""

    DONE = "done"
    FAILED = "failed"
    """With an error of its own, or that of a call it waited for."""
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Call:
    """One submitted operation, or one optimizer's part of it."""

    step: int
    """Below zero for a pass of an evaluation, zero for a snapshot between steps."""
    key: Key
    actor: str
    state: CallState
    after: tuple[tuple[int, Key], ...]
    """Step and key of what it waits for."""

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step > 0 else "an evaluation" if self.step < 0 else "a checkpoint"
        return f"{self.key} of {where}"


def at(calls: Sequence[Call], actor: str) -> str:
    """Say in words where `actor` is, from the calls in the order of their submission."""
    unfinished = {(call.step, call.key) for call in calls if call.state is CallState.PENDING}
    own = [call for call in calls if call.actor == actor and call.state is CallState.PENDING]
    if not own:
        return "idle"
    for call in own:
        if not any(needed in unfinished for needed in call.after):
            return f"at {call}"
    needed = next(needed for needed in own[0].after if needed in unfinished)
    awaited = next(call for call in calls if (call.step, call.key) == needed and call.state is CallState.PENDING)
    return f"waiting to do {own[0]}, for {awaited} ({awaited.actor})"


def lost(calls: Sequence[Call], actor: str) -> Call | None:
    """The first call of a dead actor that it did not end: the one it died in, or before."""
    return next((call for call in calls if call.actor == actor and call.state is not CallState.DONE), None)


def failed(calls: Sequence[Call]) -> Call | None:
    """The first call with an error of its own: what it waited for did not fail."""
    errors = {(call.step, call.key) for call in calls if call.state is CallState.FAILED}
    return next(
        (call for call in calls if call.state is CallState.FAILED and not errors.intersection(call.after)), None
    )
