"""Real steps on random tokens, two in flight as a run has them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.coordinator import Coordinator, SubmittedStep
from pipeline.messages import StepResult
from tasks.bench.synthetic import random_batch
from tasks.preparation import Preparation

WARM_UP_STEPS = 2
"""The first compiles, the second fills the pipeline."""

IN_FLIGHT = 2


class Stepper:
    """Submits steps and notes when each ended. Steps count from 1."""

    def __init__(self, coordinator: Coordinator, preparation: Preparation, say: Callable[[str], None]) -> None:
        self.submitted: list[SubmittedStep] = []
        self.results: list[StepResult] = []
        self.ends_s: list[float] = []
        """`time.monotonic()` when the result was known."""
        self.submits_s: list[float] = []
        """What the submission of each step took."""
        self._coordinator = coordinator
        self._preparation = preparation
        self._say = say

    @property
    def ended(self) -> int:
        """Steps whose result is known."""
        return len(self.results)

    def advance(self, checkpoint: Path | None = None) -> SubmittedStep:
        """Submit the next step, then wait for the one before it if that is still in flight.

        Args:
            checkpoint: Directory that receives every layer's state after its update.
        """
        step = len(self.submitted) + 1
        batch = random_batch(self._preparation.recipe, self._preparation.spec.vocab_size, step)
        began_s = time.monotonic()
        self.submitted.append(self._coordinator.submit(step, batch, checkpoint))
        self.submits_s.append(time.monotonic() - began_s)
        if len(self.submitted) - self.ended == IN_FLIGHT:
            self.finish()
        return self.submitted[-1]

    def finish(self) -> None:
        """Wait for the oldest step in flight."""
        submitted = self.submitted[self.ended]
        result = self._coordinator.wait(submitted)
        self.results.append(result)
        self.ends_s.append(time.monotonic())
        took = f"{self.ends_s[-1] - self.ends_s[-2]:.3f} s" if self.ended > 1 else "first"
        self._say(f"step {submitted.step}: {took}, loss {result.loss:.4f}, |g| {result.grad_norm:.4f}")

    def lengths_s(self, first: int, last: int) -> tuple[float, ...]:
        """Of the steps `first` to `last`, both counted, from 2 up: from the end of the one before to its own."""
        return tuple(after - before for before, after in itertools.pairwise(self.ends_s[first - 2 : last]))
