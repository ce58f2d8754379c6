"""What it costs that a step is a graph of Ray calls: time in which no lane works, and the same graph without Ray.

Steps of the actors and steps of the same parts in this process, without Ray and one operation after another, turn
about. A step of the actors also overlaps its updates with the next forward, so it may be the shorter one. Both compute
with one thread: two that wait for one another would measure what else the machine does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray

from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.lanes import any_busy_s
from tasks.bench.crew import bench_crew
from tasks.bench.inline_crew import inline_crew
from tasks.bench.stepper import WARM_UP_STEPS, Stepper
from tasks.bench.synthetic import random_batch
from tasks.preparation import Preparation

CALLS = 200
"""Empty calls that are timed."""


@dataclass(frozen=True)
class ControlReport:
    """Of a steady step; medians."""

    operations: int
    """Of the graph."""
    calls: int
    """Of actors: an update is one a part."""
    step_s: float
    inline_step_s: float
    """Without Ray, nothing overlapping."""
    idle_s: float
    """A step's time in which no lane of any actor was at work."""
    submit_s: float
    """The driver's, to submit a step."""
    call_s: float
    """Of an empty call, there and back."""
    streamed_call_s: float
    """Of one of many empty calls, sent before the first answer."""

    @property
    def idle_per_operation_s(self) -> float:
        """What control adds to each operation."""
        return self.idle_s / self.operations


def measure_control(preparation: Preparation, *, steps: int, rounds: int, say: Callable[[str], None]) -> ControlReport:
    """Time steps with and without Ray. Ray must be connected.

    Args:
        preparation: Of the recipe; its state is held twice.
        steps: Of a segment with Ray, and of one without.
        rounds: Pairs of segments.
        say: Told how it goes.

    Raises:
        ValueError: The recipe asks for a GPU, which two processes cannot both have.
        TierError: The memory does not do.
    """
    if preparation.cuda:
        raise ValueError("bench control runs the graph in two processes; give train.device = cpu, and a small model")
    schedule = preparation.placement.schedule
    preparation = replace(preparation, compute=replace(preparation.compute, threads=1))
    idle_s: list[float] = []
    actors_s: list[float] = []
    inline_s: list[float] = []
    with inline_crew(preparation) as inline, bench_crew(preparation, say) as crew:
        alone = Coordinator(inline, schedule, applied_steps=0)
        coordinator = Coordinator(crew, schedule, applied_steps=0)
        stepper = Stepper(coordinator, preparation, _silent)
        for number in range(rounds + 1):
            window = _segment(crew, coordinator, stepper, steps)
            without = [_inline_step(alone, preparation, step) for step in range(number * steps, (number + 1) * steps)]
            say(
                f"round {number}: {window.step_s * 1e3:.2f} ms a step, of which no lane works for "
                f"{window.idle_s * 1e3:.2f}; {statistics.median(without) * 1e3:.2f} ms without Ray"
            )
            if number:  # the first is for compilers and caches
                idle_s.append(window.idle_s)
                actors_s.append(window.step_s)
                inline_s.append(statistics.median(without))
        call_s, streamed_call_s = _calls(crew)
    refs = stepper.submitted[-1].refs
    return ControlReport(
        operations=len(refs),
        calls=sum(map(len, refs.values())),
        step_s=statistics.median(actors_s),
        inline_step_s=statistics.median(inline_s),
        idle_s=statistics.median(idle_s),
        submit_s=statistics.median(stepper.submits_s),
        call_s=call_s,
        streamed_call_s=streamed_call_s,
    )


@dataclass(frozen=True)
class _Window:
    """Steady steps, by the step."""

    step_s: float
    idle_s: float


def _segment(crew: Crew, coordinator: Coordinator, stepper: Stepper, steps: int) -> _Window:
    """Run steps that fill the pipeline and then `steps` more."""
    first = len(stepper.submitted)
    for _ in range(WARM_UP_STEPS + steps):
        stepper.advance()
    stepper.finish()
    coordinator.drain()
    updates = [ref for step in stepper.submitted[first:] for ref in step.updates]
    spans = crew.take_spans() + ray.get(updates)
    start_s, end_s = stepper.ends_s[first + WARM_UP_STEPS - 1], stepper.ends_s[-1]
    window_s = end_s - start_s
    return _Window(window_s / steps, (window_s - any_busy_s(spans, start_s, end_s)) / steps)


def _inline_step(coordinator: Coordinator, preparation: Preparation, step: int) -> float:
    batch = random_batch(preparation.recipe, preparation.spec.vocab_size, step)
    began_s = time.monotonic()
    coordinator.submit(step, batch)
    return time.monotonic() - began_s


def _calls(crew: Crew) -> tuple[float, float]:
    """Seconds of an empty call: alone, and one of many on their way."""
    question = crew.prefetcher.take_spans
    alone_s = []
    for _ in range(CALLS):
        began_s = time.monotonic()
        ray.get(question.remote())
        alone_s.append(time.monotonic() - began_s)
    began_s = time.monotonic()
    ray.get([question.remote() for _ in range(CALLS)])
    return statistics.median(alone_s), (time.monotonic() - began_s) / CALLS


def _silent(_: str) -> None:
    """Of some hundred short steps a line each would cost time that is measured."""
