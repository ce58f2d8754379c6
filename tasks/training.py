"""The run itself: steps in flight, evaluations, checkpoints, and the ways it can end.

Two steps are in flight: the graph of the next one is submitted before this one's result is awaited, so that updates
overlap the next forward. An evaluation, and the end of the run, wait for all of it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from pipeline.coordinator import Coordinator, SubmittedStep
from pipeline.errors import NonFiniteError
from pipeline.messages import Batch, LossSum, StepResult
from pipeline.recipe import Recipe
from tasks.checkpointing import Checkpoints, Progress
from tasks.data.loader import BatchLoader, StepBatch
from tasks.run_log import RunLog
from tasks.vigil import Vigil

logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2


class Ending(Enum):
    """How a run ended."""

    TRAINED = "trained"
    STOPPED = "stopped"
    """By a signal, with a checkpoint of the last finished step."""


@dataclass
class _InFlight:
    """A step whose result is still to come."""

    step: int
    batch: StepBatch
    submitted: SubmittedStep | None
    """None for a step without supervised tokens: nothing of it was submitted."""


@dataclass
class Training:
    """Drives a run from `progress` to the recipe's last step."""

    recipe: Recipe
    coordinator: Coordinator
    loader: BatchLoader
    held_out: Callable[[], Iterator[Batch]] | None
    """Makes the batches of an evaluation anew; None where nothing is held out."""
    checkpoints: Checkpoints
    begin: Callable[[], RunLog]
    """Called once the first step is next: nothing of the run has been written before."""
    is_evaluated: bool
    """Whether the evaluation at `progress` is accounted for."""
    progress: Progress
    stop_requested: Callable[[], bool]
    require_alive: Callable[[], None]
    """Raises ActorLostError where an actor is gone, also one that no call of the step waited for."""
    vigil: Vigil
    _log: RunLog = field(init=False)
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _skipped_in_a_row: int = 0
    _owes_evaluation: bool = False

    def run(self) -> Ending:
        """Train to the end, or until a stop is requested.

        Raises:
            NonFiniteError: Too many steps in a row were not finite, or one was whose updates could not be withheld.
            CheckpointError: A checkpoint could not be written.
            KeyboardInterrupt: A stop was requested before the first step.
            RayError: An actor failed or died.
        """
        steps, first = self.recipe.train.steps, self.progress.step + 1
        next_step = first
        # A run that died between a checkpoint and its evaluation still owes it.
        at_evaluation = self.progress.step == 0 or self._evaluation_follows(self.progress.step)
        total = self._measure() if at_evaluation and not self.is_evaluated else None
        self._log = self.begin()
        if total is not None:
            self._account_for_evaluation(total)
        while True:
            # A stop just after the beginning leaves a step to be saved, too.
            stops = self.stop_requested() and next_step > first
            may_submit = next_step <= steps and not stops and not self._must_wait_before(next_step)
            if may_submit and len(self._in_flight) < STEPS_IN_FLIGHT:
                self._submit(next_step)
                next_step += 1
            elif self._in_flight:
                self._finish(self._in_flight.popleft())
            else:
                break
        self._log.sync()
        with self.vigil.over("last checkpoint"):
            self.checkpoints.write_now(self.coordinator, self.progress)
        return Ending.STOPPED if self.progress.step < steps or self._owes_evaluation else Ending.TRAINED

    def _submit(self, step: int) -> None:
        with self.vigil.over("data"):
            batch = self.loader.next()
        if batch.batch.supervised_tokens == 0:
            self._in_flight.append(_InFlight(step, batch, None))
            return
        directory = None
        if self.checkpoints.due(step):
            with self.vigil.over("checkpoint before"):
                directory = self.checkpoints.begin(step)
        submitted = self.coordinator.submit(step, batch.batch, directory)
        if directory is not None:
            self.checkpoints.submitted(submitted.snapshots)
        self._in_flight.append(_InFlight(step, batch, submitted))

    def _finish(self, oldest: _InFlight) -> None:
        """Wait for the oldest step and account for it."""
        with self.vigil.over("step"):
            result = self.coordinator.wait(oldest.submitted) if oldest.submitted else None
            self.require_alive()
            applied = result is not None and result.control.applied
            self.progress = self.progress.after(oldest.step, oldest.batch.position_after, applied=applied)
            self._log.step(self.progress, oldest.batch, oldest.submitted, result)
        if self.checkpoints.due(oldest.step):
            # Before it is published: a run that goes on from it must find the rows that lead there.
            self._log.sync()
        if result is not None:
            self._stop_if_not_finite(oldest.step, result)
        self.checkpoints.reached(self.progress)
        self.checkpoints.collect(wait=False)
        if self._owes_checkpoint(oldest):
            self.checkpoints.write_now(self.coordinator, self.progress)
        if self._evaluation_follows(oldest.step):
            self._evaluate()

    def _stop_if_not_finite(self, step: int, result: StepResult) -> None:
        if result.non_finite is None:
            self._skipped_in_a_row = 0
            return
        where = "the loss" if result.non_finite == "loss" else f"the gradient of {result.non_finite}"
        if result.control.applied:
            raise NonFiniteError(
                f"step {step}: {where} is not finite, and without clipping some updates had been applied when that was "
                "known. The weights in memory are lost; resume from the last checkpoint, with "
                "optimizer.max_grad_norm > 0 such a step is skipped instead"
            )
        self._skipped_in_a_row += 1
        logger.warning("step %d skipped: %s is not finite; weights and moments are as before", step, where)
        if self._skipped_in_a_row > self.recipe.train.max_skipped_in_a_row:
            raise NonFiniteError(
                f"step {step}: {where} is not finite, as in the {self._skipped_in_a_row - 1} steps before it (limit "
                f"train.max_skipped_in_a_row = {self.recipe.train.max_skipped_in_a_row}). No update was applied in "
                "them. Lower optimizer.lr, look at the data of these steps, or resume from an earlier checkpoint"
            )

    def _evaluation_follows(self, step: int) -> bool:
        every = self.recipe.eval.every_steps
        return bool(every and (step % every == 0 or step == self.recipe.train.steps))

    def _must_wait_before(self, step: int) -> bool:
        """Whether a step in flight has to end first.

        An evaluation measures the weights of its step, and a checkpoint says how far its step came, before the next
        checkpoint begins.
        """
        owed = any(
            self._evaluation_follows(waiting.step) or self._owes_checkpoint(waiting) for waiting in self._in_flight
        )
        return owed or (self.checkpoints.due(step) and not self.checkpoints.can_begin())

    def _owes_checkpoint(self, step: _InFlight) -> bool:
        """Whether a checkpoint belongs after a step of which nothing was submitted: no graph of it writes one."""
        return step.submitted is None and self.checkpoints.due(step.step)

    def _evaluate(self) -> None:
        total = self._measure()
        if total is None:
            return
        if self.stop_requested():
            self._owes_evaluation = True
            return
        self._account_for_evaluation(total)

    def _measure(self) -> LossSum | None:
        if self.held_out is None or not self.recipe.eval.every_steps:
            return None
        with self.vigil.over("evaluation"):
            # A stop may not wait for the rest of a long one: the run that goes on owes it still.
            return self.coordinator.evaluate(takewhile(lambda _: not self.stop_requested(), self.held_out()))

    def _account_for_evaluation(self, total: LossSum) -> None:
        loss = total.loss_sum / total.supervised_tokens if total.supervised_tokens else math.nan
        self._log.evaluation(self.progress.step, loss, total.supervised_tokens)
