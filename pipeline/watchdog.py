"""When waiting has become worth a word: ten times what it took so far. Pure; `tasks.vigil` waits and speaks."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

FACTOR = 10.0
"""Times the usual duration: past any jitter, a small part of a run."""
LEAST_S = 30.0
"""Never sooner: a pause of the machine (paging, another process) is no fault."""
FIRST_S = 900.0
"""For the first of a kind, of which nothing is known: compiling a large model's layers takes minutes."""
REMEMBERED = 20


@dataclass
class Patience:
    """How long each kind of wait may take before it is reported. Times are seconds of any one clock."""

    factor: float = FACTOR
    least_s: float = LEAST_S
    first_s: float = FIRST_S
    _taken_s: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED)))

    def took(self, kind: str, seconds: float) -> None:
        """Learn from a wait that ended."""
        self._taken_s[kind].append(seconds)

    def usual_s(self, kind: str) -> float | None:
        """Median of the last waits of this kind; None before the first has ended."""
        taken_s = self._taken_s.get(kind)
        return statistics.median(taken_s) if taken_s else None

    def limit_s(self, kind: str) -> float:
        """Seconds after which a wait of this kind is reported."""
        usual_s = self.usual_s(kind)
        return self.first_s if usual_s is None else max(self.least_s, self.factor * usual_s)
