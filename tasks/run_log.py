"""Everything that a run says about its steps: rows on disk, lines on the console, gauges, spans of the lanes."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray

from pipeline.coordinator import SubmittedStep
from pipeline.crew import Crew
from pipeline.messages import Lane, LaneSpan, StepResult
from pipeline.metrics import (
    ConsoleLog,
    EvaluationWriter,
    EventsWriter,
    MetricsWriter,
    RunGauges,
    StallSeconds,
    StepMetrics,
)
from pipeline.recipe import Recipe
from pipeline.stalls import stalls_of
from tasks.checkpointing import Progress
from tasks.data.loader import StepBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What turns seconds, tokens and spans into rates and stalls."""

    flops_per_token: float
    arena_bytes: int
    head: int
    """Index of the head layer."""


class RunLog:
    """Written by the driver, once a step. A context manager that closes its files."""

    def __init__(self, recipe: Recipe, crew: Crew, facts: RunFacts, resumed_step: int) -> None:
        """Open the files of the run directory; rows after the resumed step are dropped."""
        run = recipe.run
        self._facts = facts
        self._crew = crew
        self._metrics = MetricsWriter(run.dir, resumed_step)
        self._evaluations = EvaluationWriter(run.dir, resumed_step)
        self._events = EventsWriter(run.dir, recipe.log.events_max_mib, resumed_step)
        self._console = ConsoleLog(recipe.train.steps, recipe.log.every_s)
        self._gauges = RunGauges(run.name)
        self._spans_before: list[LaneSpan] = []
        self._updates: dict[int, list[Any]] = {}
        self._learning_rate = recipe.learning_rate()
        self._compiled_graphs: deque[int] = deque(maxlen=2)
        """Known after each of the last steps."""
        self._ended_s = time.monotonic()

    def step(
        self, progress: Progress, batch: StepBatch, submitted: SubmittedStep | None, result: StepResult | None
    ) -> None:
        """Account for a finished step.

        Args:
            progress: With the step counted.
            batch: What it trained on.
            submitted: Its calls; None where nothing was submitted.
            result: None likewise.
        """
        started_s, self._ended_s = self._ended_s, time.monotonic()
        step_s = self._ended_s - started_s
        spans = self._collect(progress.step, submitted)
        # Those taken last time also hold what ended between that step's result and the taking.
        stalls = stalls_of([*self._spans_before, *spans], started_s, self._ended_s, self._facts.head)
        self._spans_before = spans
        tokens_per_s = batch.batch.tokens / step_s
        applied = result is not None and result.control.applied
        metrics = StepMetrics(
            step=progress.step,
            applied_steps=progress.applied_steps,
            loss=result.loss if result else math.nan,
            lr=result.control.lr if result else self._learning_rate.at(progress.applied_steps + 1),
            grad_norm=result.grad_norm if result else math.nan,
            tokens=batch.batch.tokens,
            supervised_tokens=batch.batch.supervised_tokens,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            model_tflops=self._facts.flops_per_token * tokens_per_s / 1e12,
            stall_s=StallSeconds(load=stalls.load, stage=stalls.stage, update=stalls.update, data=batch.wait_s),
            gpu_peak_bytes=result.gpu_peak_bytes if result else 0,
            host_bytes=held_bytes(self._crew, self._facts.arena_bytes),
            nvme_read_bytes=sum(span.num_bytes for span in spans if span.lane is Lane.NVME_READ),
            nvme_write_bytes=sum(span.num_bytes for span in spans if span.lane is Lane.NVME_WRITE),
            skipped=not applied,
            skip_reason=_skip_reason(result),
        )
        self._metrics.write(metrics)
        self._console.step(metrics)
        self._note_compiling(progress.step, result)
        self._gauges.step(metrics)
        self._events.write(progress.step, spans)

    def _note_compiling(self, step: int, result: StepResult | None) -> None:
        """Say where time went that no lane shows. The first two steps compile what a run needs."""
        if result is None:
            return
        if len(self._compiled_graphs) == 2 and result.compiled_graphs > self._compiled_graphs[-1]:
            logger.warning(
                "%d graphs were compiled anew before the end of step %d: a shape or a setting of the layers changed",
                result.compiled_graphs - self._compiled_graphs[-1],
                step,
            )
        self._compiled_graphs.append(result.compiled_graphs)

    def evaluation(self, step: int, loss: float, supervised_tokens: int) -> None:
        """Account for an evaluation; its time counts to no step."""
        self._evaluations.write(step, loss, supervised_tokens)
        self._console.evaluation(step, loss, supervised_tokens)
        self._ended_s = time.monotonic()

    def sync(self) -> None:
        """Make the rows so far outlive a crash of the machine; the spans may go, nobody counts them."""
        self._metrics.sync()
        self._evaluations.sync()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._evaluations.close()
        self._events.close()

    def _collect(self, step: int, submitted: SubmittedStep | None) -> list[LaneSpan]:
        """Take what the lanes did since the last call. The updates of the step before are over by now."""
        new = self._crew.take_spans() + ray.get(self._updates.pop(step - 1, []))
        if submitted is not None:
            self._updates[step] = submitted.updates
        return new


def _skip_reason(result: StepResult | None) -> str | None:
    if result is None:
        return "no supervised token"
    return None if result.control.applied else f"{result.non_finite} is not finite"


def held_bytes(crew: Crew, arena_bytes: int) -> int:
    """Host memory that the run holds now: the arena once, and what each process has for itself."""
    return arena_bytes + crew.processes.private_bytes()
