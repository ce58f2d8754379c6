"""Runs the step graph: submits each operation as a Ray call whose dependencies are the refs of those it waits for.

The coordinator knows which actor does which operation and nothing of their order (`schedule` does). It lives in the
driver; the bytes never pass through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayError

from pipeline.call_states import ACTORS, Call, CallState
from pipeline.crew import Crew, optimizer_name
from pipeline.messages import Batch, LossSum, StepControl, StepResult
from pipeline.schedule import SchedulePlan, build_evaluation, build_snapshot, build_step
from pipeline.step.operations import Key, Op, Operation
from tiers.shards import FileRecord

Ref = Any
"""An ObjectRef of whatever the operation returns; an update has one a part."""


@dataclass
class SubmittedStep:
    """A step whose calls are under way."""

    step: int
    result: Ref
    """Of a StepResult; resolves when the gradients are complete, before clipped updates are."""
    refs: dict[Key, list[Ref]]
    snapshots: list[Ref] = field(default_factory=list)
    """Of tuples of FileRecord, one a layer; empty where no checkpoint was asked for."""

    @property
    def updates(self) -> list[Ref]:
        """Of LaneSpan: one a layer and optimizer actor."""
        return [ref for key, refs in self.refs.items() if key.op is Op.UPDATE for ref in refs]


class _Submission(NamedTuple):
    """One graph under way, kept to tell where its calls are."""

    step: int
    operations: Sequence[Operation]
    refs: dict[Key, list[Ref]]


KEPT_SUBMISSIONS = 4
"""Two steps are in flight, updates of the one before may still run, and wait for snapshots of the one before that."""


class Coordinator:
    """Submits steps, evaluations and snapshots. Up to two steps are in flight; the caller bounds them by `result`."""

    def __init__(self, crew: Crew, plan: SchedulePlan, *, applied_steps: int) -> None:
        self._crew = crew
        self._plan = plan
        self._step_operations = {
            (checkpoint, captures): build_step(plan, checkpoint=checkpoint, captures=captures)
            for checkpoint in (False, True)
            for captures in (False, True)
        }
        self._evaluation_operations = build_evaluation(plan)
        self._last: dict[Key, list[Ref]] = {}
        self._last_checkpoint: Path | None = None
        """That the step submitted last writes."""
        self._control: Ref = ray.put(
            StepControl(applied=True, applied_steps=applied_steps, lr=0.0, clip_coefficient=1.0)
        )
        self._passes = 0
        self._recent: deque[_Submission] = deque(maxlen=KEPT_SUBMISSIONS)

    def submit(self, step: int, batch: Batch, checkpoint: Path | None = None) -> SubmittedStep:
        """Submit every call of one step and return at once.

        Args:
            step: Number of the step, from 1.
            batch: Its micro-batches, with at least one supervised token.
            checkpoint: Directory that receives every layer's state after its update.
        """
        submitted = SubmittedStep(step, None, {})
        captured = self._last_checkpoint
        operations = self._step_operations[checkpoint is not None, captured is not None]
        self._recent.append(_Submission(step, operations, submitted.refs))
        for operation in operations:
            key = operation.key
            after = [ref for needed in operation.after for ref in submitted.refs[needed]]
            after += [ref for needed in operation.after_last for ref in self._last.get(needed, [])]
            directory = captured if key.op is Op.CAPTURE else checkpoint
            submitted.refs[key] = self._call(step, operation, after, batch, directory, submitted)
        submitted.snapshots = [ref for key, refs in submitted.refs.items() if key.op is Op.SNAPSHOT for ref in refs]
        self._last, self._last_checkpoint = submitted.refs, checkpoint
        return submitted

    def wait(self, submitted: SubmittedStep) -> StepResult:
        """Wait for the step's loss and gradient norm.

        Raises:
            RayTaskError: An operation failed; its cause is the error of the actor.
            ActorDiedError: An actor died.
        """
        return cast("StepResult", ray.get(submitted.result))

    def drain(self) -> None:
        """Wait until nothing is in flight that changes a layer; a checkpoint may still be written from copies."""
        ray.get([ref for refs in self._last.values() for ref in refs])

    def evaluate(self, batches: Iterator[Batch]) -> LossSum:
        """Measure the loss over `batches` with the weights as they are; waits for everything in flight first."""
        self.drain()
        total, tokens = 0.0, 0
        for batch in batches:
            # Passes have numbers of their own, below zero, so that they never meet a step's.
            self._passes -= 1
            refs: dict[Key, list[Ref]] = {}
            self._recent.append(_Submission(self._passes, self._evaluation_operations, refs))
            for operation in self._evaluation_operations:
                after = [ref for needed in operation.after for ref in refs[needed]]
                refs[operation.key] = self._call(self._passes, operation, after, batch, None, None)
            part = cast("LossSum", ray.get(refs[Key(Op.EVALUATE)][0]))
            total += part.loss_sum
            tokens += part.supervised_tokens
        return LossSum(total, tokens)

    def snapshot(self, directory: Path) -> tuple[FileRecord, ...]:
        """Write every layer's state to `directory` between steps; waits for everything in flight first."""
        self.drain()
        operations = build_snapshot(self._plan)
        refs = {operation.key: self._call(0, operation, [], None, directory, None) for operation in operations}
        self._recent.append(_Submission(0, operations, refs))
        return tuple(record for (ref,) in refs.values() for record in ray.get(ref))

    def calls(self) -> tuple[Call, ...]:
        """What has become of the calls submitted last, in the order of their submission. Waits for none of them."""
        found: list[Call] = []
        before: int | None = None
        for step, operations, refs in list(self._recent):
            for operation in operations:
                after = [(step, key) for key in operation.after]
                if before is not None and step > 0:
                    after += [(before, key) for key in operation.after_last]
                for part, ref in enumerate(refs.get(operation.key, ())):
                    kind = ACTORS[operation.key.op]
                    actor = optimizer_name(part) if kind == "optimizer" else kind
                    found.append(Call(step, operation.key, actor, _state(ref), tuple(after)))
            before = step if step > 0 else before
        return tuple(found)

    def _call(
        self,
        step: int,
        operation: Operation,
        after: Sequence[Ref],
        batch: Batch | None,
        directory: Path | None,
        submitted: SubmittedStep | None,
    ) -> list[Ref]:
        """Submit one operation to the actor that does it."""
        key, layer, slot = operation.key, operation.key.layer, operation.slot
        compute, prefetcher, name = self._crew.compute, self._crew.prefetcher, str(operation.key)
        match key.op:
            case Op.BEGIN:
                return [compute.begin.options(name=name).remote(step, batch, *after)]
            case Op.STAGE:
                return [compute.stage.options(name=name).remote(step, layer, slot, *after)]
            case Op.FORWARD:
                return [compute.forward.options(name=name).remote(step, layer, slot, *after)]
            case Op.HEAD:
                return [compute.head.options(name=name).remote(step, slot, *after)]
            case Op.EVALUATE:
                return [compute.evaluate_head.options(name=name).remote(step, slot, *after)]
            case Op.RECOMPUTE:
                return [compute.recompute.options(name=name).remote(step, layer, slot, *after)]
            case Op.BACKWARD:
                return [compute.backward.options(name=name).remote(step, layer, slot, *after)]
            case Op.OFFLOAD:
                return [compute.offload.options(name=name).remote(step, layer, *after)]
            case Op.STORE_SUM:
                return [compute.store_sum.options(name=name).remote(step, layer, *after)]
            case Op.FETCH_SUM:
                return [compute.fetch_sum.options(name=name).remote(step, layer, *after)]
            case Op.LOSS:
                self._control = compute.loss.options(name=name).remote(step, self._control, *after)
                return [self._control]
            case Op.NORM:
                assert submitted is not None
                control, submitted.result = compute.norm.options(name=name).remote(step, self._control, *after)
                if self._plan.clip:
                    self._control = control
                return [control]
            case Op.LEND_STATE:
                return [compute.lend_state.options(name=name).remote(step, layer, *after)]
            case Op.UPDATE_ON_DEVICE:
                return [compute.update_on_device.options(name=name).remote(step, layer, slot, self._control, *after)]
            case Op.RETURN_STATE:
                return [compute.return_state.options(name=name).remote(step, layer, slot, *after)]
            case Op.UPDATE:
                return [
                    optimizer.update.options(name=name).remote(step, layer, self._control, *after)
                    for optimizer in self._crew.optimizers
                ]
            case Op.LOAD_WEIGHTS:
                return [prefetcher.load_weights.options(name=name).remote(layer, *after)]
            case Op.LOAD_STATE:
                return [prefetcher.load_state.options(name=name).remote(layer, *after)]
            case Op.STORE_STATE:
                return [prefetcher.store_state.options(name=name).remote(layer, *after)]
            case Op.SNAPSHOT:
                return [prefetcher.snapshot.options(name=name).remote(layer, directory, *after)]
            case Op.CAPTURE:
                return [prefetcher.capture.options(name=name).remote(layer, directory, *after)]


def _state(ref: Ref) -> CallState:
    ready, _ = ray.wait([ref], timeout=0)
    if not ready:
        return CallState.PENDING
    try:
        ray.get(ref)
    except RayError:
        return CallState.FAILED
    return CallState.DONE
