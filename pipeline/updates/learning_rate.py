"""The learning rate as a pure function of the step: nothing to save, nothing that a resume could get wrong.

`Coordinator` asks for the rate of applied step t (1, 2, ...); micro-batches, epochs and skipped steps do not enter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up, then one of four shapes.

    Step t of the warm-up uses `base * t / warmup_steps`, so that step 1 already learns and step `warmup_steps` uses
    `base`. After it, the first step uses `base` and the rate falls towards `base * final_ratio`, which it reaches one
    step past the last: with a ratio of 0 no step is wasted at rate 0. Without warm-up the values are those of
    transformers' `get_cosine_schedule_with_warmup` and its siblings.
    """

    kind: ScheduleKind
    """constant: stays at `base`; linear, cosine: fall over all steps after the warm-up; wsd (warm-up, stable, decay):
    stays at `base` and falls linearly over the last `decay_steps`."""
    base: float
    """Highest rate."""
    warmup_steps: int
    total_steps: int
    """Steps of the whole run; the fall ends here. Later steps stay at the final rate."""
    final_ratio: float = 0.0
    """Final rate / base, 0 to 1. Unused by `constant`."""
    decay_steps: int = 0
    """Length of the fall of `wsd`; unused by the others."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base) and self.base >= 0):
            raise ValueError(f"learning rate must be a finite number >= 0, got {self.base}")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"warm-up must take 0 to {self.total_steps} steps (all of the run), got {self.warmup_steps}"
            )
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final learning rate ratio must lie in 0 to 1, got {self.final_ratio}")
        if self.kind == "wsd" and not 1 <= self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ValueError(
                f"wsd needs a decay of 1 to {self.total_steps - self.warmup_steps} steps (what the warm-up of "
                f"{self.warmup_steps} leaves of {self.total_steps}), got {self.decay_steps}"
            )

    def at(self, step: int) -> float:
        """Rate of applied step `step`, counted from 1.

        Raises:
            ValueError: `step` is below 1.
        """
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        if step <= self.warmup_steps:
            return self.base * step / self.warmup_steps
        if self.kind == "constant":
            return self.base
        fall_steps = self.decay_steps if self.kind == "wsd" else self.total_steps - self.warmup_steps
        into_fall = step - 1 - (self.total_steps - fall_steps)
        progress = min(1.0, max(0.0, into_fall / fall_steps)) if fall_steps else 1.0
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
        return self.base * (self.final_ratio + (1.0 - self.final_ratio) * left)
