"""What a run says about itself: a row a step on disk, a line a step on the console, gauges on Ray's dashboard.

Called by the driver, once a step. Nothing here decides anything.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import ray
from ray.util.metrics import Gauge

from pipeline.json_lines import JsonLines, finite, has_row
from pipeline.messages import LaneSpan
from tiers.quantities import shown_count, shown_duration

logger = logging.getLogger(__name__)

EVALUATION_NAME = "evaluation.jsonl"

_RECENT_STEPS = 20
"""Steps whose median time predicts the rest: a compilation, an evaluation or a checkpoint does not move it."""


@dataclass(frozen=True, slots=True)
class StallSeconds:
    """Seconds of a step that the device waited, by cause."""

    load: float = 0.0
    """For weights from NVMe."""
    stage: float = 0.0
    """For weights on their way to the device."""
    update: float = 0.0
    """For the optimizer to finish the layer that comes next."""
    data: float = 0.0
    """For the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step, as a row of metrics.jsonl has it."""

    step: int
    """Attempted steps, this one included."""
    applied_steps: int
    """Steps that moved the weights, this one included if it did."""
    loss: float
    """Per supervised token; NaN where there was none or it was not finite."""
    lr: float
    """Learning rate that the step's update used, or would have used."""
    grad_norm: float
    """Before clipping; NaN where it was not computed."""
    tokens: int
    """Real tokens, padding left out."""
    supervised_tokens: int
    step_s: float
    tokens_per_s: float
    """Real tokens a second."""
    model_tflops: float
    """Model TFLOP/s: 6 x matmul parameters x tokens + 6 x layers x sequence x hidden x tokens, over the step's time;
    recompute is not counted."""
    stall_s: StallSeconds
    gpu_peak_bytes: int
    host_bytes: int
    nvme_read_bytes: int
    nvme_write_bytes: int
    skipped: bool
    """Whether the step left weights and moments as they were."""
    skip_reason: str | None = None


class MetricsWriter:
    """metrics.jsonl: one object a step. Numbers that are not finite are null and named in `non_finite`."""

    def __init__(self, run_dir: Path, resumed_step: int = 0) -> None:
        """Open the file of the run that goes on after `resumed_step`."""
        self._lines = JsonLines(run_dir / "metrics.jsonl", resumed_step)

    def write(self, metrics: StepMetrics) -> None:
        """Append the row of a step."""
        row = finite(asdict(metrics))
        row["stall_s"] = {cause: value if math.isfinite(value) else None for cause, value in row["stall_s"].items()}
        self._lines.append(row)

    def sync(self) -> None:
        """Make the rows so far outlive a crash of the machine."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class EvaluationWriter:
    """evaluation.jsonl: one object an evaluation, `step, loss, supervised_tokens`."""

    def __init__(self, run_dir: Path, resumed_step: int = 0) -> None:
        """Open the file of the run that goes on after `resumed_step`."""
        self._lines = JsonLines(run_dir / EVALUATION_NAME, resumed_step)

    def write(self, step: int, loss: float, supervised_tokens: int) -> None:
        """Append the loss on held-out data after `step`."""
        self._lines.append(finite({"step": step, "loss": loss, "supervised_tokens": supervised_tokens}))

    def sync(self) -> None:
        """Make the rows so far outlive a crash of the machine."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Whether evaluation.jsonl has a row of `step`; changes nothing."""
    return has_row(run_dir / EVALUATION_NAME, step)


class EventsWriter:
    """events.jsonl: one object an operation, `step, name, lane, actor, start_s, end_s, num_bytes`.

    Times are of the machine's monotonic clock. The file stops growing at its limit, with a word in the log.
    """

    def __init__(self, run_dir: Path, max_mib: int, resumed_step: int = 0) -> None:
        """Open the file of the run that goes on after `resumed_step`; `max_mib` of 0 records nothing."""
        self._lines = JsonLines(run_dir / "events.jsonl", resumed_step)
        self._max_bytes = max_mib * 2**20
        self.recording = self._lines.num_bytes < self._max_bytes
        """Whether spans are still wanted; whole steps are written, so that the last one recorded is complete."""

    def write(self, step: int, spans: Iterable[LaneSpan]) -> None:
        """Append the spans of a step, unless the file is full."""
        if not self.recording:
            return
        self._lines.append(*({"step": step, **asdict(span)} for span in spans))
        if self._lines.num_bytes >= self._max_bytes:
            self.recording = False
            logger.info(
                "events.jsonl has %d MiB after step %d and ends here (log.events_max_mib)", self._max_bytes >> 20, step
            )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class ConsoleLog:
    """A line a step, or every so many seconds, for people and for a job's log: plain lines, no carriage returns."""

    def __init__(
        self,
        total_steps: int,
        every_s: float = 0.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Log a run of `total_steps`.

        Args:
            total_steps: Steps of the whole run.
            every_s: Least seconds between lines of steps; skipped, first and last steps are always shown.
            stream: Standard output if None.
            clock: Seconds.
        """
        self._total_steps = total_steps
        self._every_s = every_s
        self._stream = stream
        self._clock = clock
        self._shown_s = -math.inf
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: loss, the learning rate it used, gradient norm, speed, and the time that the rest will take."""
        self._recent_s.append(metrics.step_s)
        now = self._clock()
        due = now - self._shown_s >= self._every_s
        if not (due or metrics.skipped or metrics.step >= self._total_steps):
            return
        self._shown_s = now
        parts = [f"step {metrics.step}/{self._total_steps}"]
        if metrics.skipped:
            parts.append(f"skipped: {metrics.skip_reason or 'not finite'}")
        parts += [
            f"loss {metrics.loss:.4f}",
            f"lr {metrics.lr:.1e}",
            f"|g| {metrics.grad_norm:.3g}",
            f"{shown_count(metrics.tokens_per_s)} tok/s",
        ]
        left_s = (self._total_steps - metrics.step) * statistics.median(self._recent_s)
        parts.append(f"eta {shown_duration(left_s)}" if metrics.step < self._total_steps else "done")
        self.say("  ".join(parts))

    def evaluation(self, step: int, loss: float, supervised_tokens: int) -> None:
        """Show the loss on held-out data after `step`."""
        self.say(f"eval {step}/{self._total_steps}  loss {loss:.4f}  {shown_count(supervised_tokens)} tokens")

    def say(self, line: str) -> None:
        """Show any line at once."""
        print(line, file=self._stream or sys.stdout, flush=True)


class RunGauges:
    """The last step as gauges of Ray (`megatrain_loss`, ...), tagged with the run's name; nothing outside Ray."""

    def __init__(self, run: str) -> None:
        """Declare the gauges, if Ray is initialised in this process."""
        self._gauges: dict[str, Gauge] = {}
        if not ray.is_initialized():
            return
        for name, description in _GAUGES.items():
            gauge = Gauge(f"megatrain_{name}", description, tag_keys=("run",))
            gauge.set_default_tags({"run": run})
            self._gauges[name] = gauge
        self._skipped_steps = 0

    def step(self, metrics: StepMetrics) -> None:
        """Set every gauge. Ray's exporter takes NaN as it is."""
        if not self._gauges:
            return
        self._skipped_steps += metrics.skipped
        values = asdict(metrics) | {"skipped_steps": self._skipped_steps}
        for name, gauge in self._gauges.items():
            gauge.set(float(values[name]))


_GAUGES = {
    "step": "Attempted steps.",
    "loss": "Loss per supervised token of the last step.",
    "lr": "Learning rate of the last step.",
    "grad_norm": "Gradient norm of the last step, before clipping.",
    "tokens_per_s": "Real tokens a second of the last step.",
    "model_tflops": "Model TFLOP/s of the last step.",
    "skipped_steps": "Steps skipped since the driver started.",
    "gpu_peak_bytes": "Most device memory in use in the last step.",
    "host_bytes": "Host memory held.",
}
