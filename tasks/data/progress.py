"""Says how far tokenisation is and how long it will take. Knows nothing of data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tiers.quantities import shown_bytes, shown_duration

REPORT_INTERVAL_S = 5.0


@dataclass(slots=True)
class TokenisationProgress:
    """Collects what was read and reports a line every few seconds."""

    total_bytes: int
    report: Callable[[str], None] | None = None
    clock: Callable[[], float] = time.monotonic
    read_bytes: float = 0.0
    tokens: int = 0
    _start_s: float = field(init=False)
    _reported_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_s = self._reported_s = self.clock()

    def advance(self, num_bytes: float) -> None:
        """Count bytes of the input files that were read."""
        self.read_bytes += num_bytes

    def wrote(self, tokens: int) -> None:
        """Count tokens written, and report if the last line is old."""
        self.tokens += tokens
        now_s = self.clock()
        if self.report is None or now_s - self._reported_s < REPORT_INTERVAL_S:
            return
        self._reported_s = now_s
        elapsed_s = now_s - self._start_s
        done = min(1.0, self.read_bytes / max(self.total_bytes, 1))
        left = f"about {shown_duration(elapsed_s * (1 - done) / done)} left" if done > 0 else "time left unknown"
        self.report(
            f"tokenising: {done:.0%} of {shown_bytes(self.total_bytes)}, {self.tokens:,} tokens, "
            f"{self.tokens / elapsed_s:,.0f} tokens/s, {left}"
        )
