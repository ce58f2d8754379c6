"""Times real steps: all actors, streaming, offload and updates; only the data is random."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray

from pipeline.coordinator import Coordinator
from pipeline.families.flops import model_flops_per_token
from pipeline.lanes import busy_shares
from pipeline.messages import Lane, LaneSpan
from pipeline.placement import Placement
from pipeline.stalls import Gap, Stalls, longest_gaps, stalls_of
from tasks.bench.crew import bench_crew
from tasks.bench.stepper import WARM_UP_STEPS, Stepper
from tasks.preparation import Preparation
from tasks.run_log import held_bytes
from tiers.arena_map import ArenaMap
from tiers.host_memory import available_host_bytes

MIB = 2**20
SHOWN_GAPS = 5


@dataclass(frozen=True)
class StepReport:
    """What steady steps cost."""

    parameters: int
    tokens: int
    step_s: float
    """Median."""
    step_s_all: tuple[float, ...]
    tokens_per_s: float
    model_tflops: float
    lanes: dict[str, float]
    """Busy share of each lane."""
    stalls: Stalls
    """Seconds a step."""
    gaps: tuple[Gap, ...]
    """Where the compute lane waits longest, seconds a step."""
    update_gparams_per_s: float
    """Of all optimizer actors together, while they work."""
    gpu_peak_bytes: int
    compiled_graphs: int
    compiled_late: int
    """Of them, after the warm-up: should be none."""
    device_taken_bytes: int
    """What the GPU's driver says is in use at the end, contexts and the allocator's reserve included; 0: not known."""
    host_bytes: int
    """The arena, and private memory of driver and actors."""
    host_taken_bytes: int
    """By how much available memory fell from before the first actor to the end: Ray and the driver ran already."""
    arena_bytes: int
    nvme_read_bytes: int
    """A step."""
    nvme_write_bytes: int
    first_step_s: float
    """From the start of the first actor to the first result."""
    loss: float
    grad_norm: float


def measure_steps(
    preparation: Preparation, steps: int, say: Callable[[str], None], until_s: float = math.inf
) -> StepReport:
    """Run warm-up steps and then `steps` measured ones. Ray must be connected.

    Args:
        preparation: Of the recipe.
        steps: To measure.
        say: Told how it goes.
        until_s: `time.monotonic()` from which on no step is begun, once one is measured.
    """
    recipe, placement = preparation.recipe, preparation.placement
    model = placement.tier.model
    started_s, available_bytes = time.monotonic(), available_host_bytes()
    with bench_crew(preparation, say) as crew:
        coordinator = Coordinator(crew, placement.schedule, applied_steps=0)
        stepper = Stepper(coordinator, preparation, say)
        for number in range(WARM_UP_STEPS + steps):
            if number > WARM_UP_STEPS and time.monotonic() > until_s:
                break
            stepper.advance()
        stepper.finish()
        coordinator.drain()
        submitted, results, ends_s = stepper.submitted, stepper.results, stepper.ends_s
        spans = crew.take_spans() + ray.get([ref for step in submitted for ref in step.updates])
        host_bytes = held_bytes(crew, ArenaMap.of(placement.tier).total_bytes)
        host_taken_bytes = available_bytes - available_host_bytes()
        device_taken_bytes = device_bytes_in_use() if preparation.cuda else 0
    steps = len(submitted) - WARM_UP_STEPS
    start_s, end_s = ends_s[WARM_UP_STEPS - 1], ends_s[-1]
    step_s_all = stepper.lengths_s(WARM_UP_STEPS + 1, len(submitted))
    step_s = statistics.median(step_s_all)
    tokens = recipe.train.sequences_per_step * recipe.train.sequence_length
    stalls = stalls_of(spans, start_s, end_s, placement.schedule.head)
    gaps = longest_gaps(spans, start_s, end_s, SHOWN_GAPS)
    return StepReport(
        parameters=model.num_parameters,
        tokens=tokens,
        step_s=step_s,
        step_s_all=step_s_all,
        tokens_per_s=tokens / step_s,
        model_tflops=model_flops_per_token(preparation.spec, recipe.train.sequence_length) * tokens / step_s / 1e12,
        lanes={str(lane): share for lane, share in busy_shares(spans, start_s, end_s).items()},
        stalls=Stalls(*(value / steps for value in (stalls.load, stalls.stage, stalls.update, stalls.control))),
        gaps=tuple(replace(gap, seconds=gap.seconds / steps) for gap in gaps),
        update_gparams_per_s=_update_rate(spans, _updated_on_host(placement), len(submitted)),
        gpu_peak_bytes=max(result.gpu_peak_bytes for result in results),
        compiled_graphs=results[-1].compiled_graphs,
        compiled_late=results[-1].compiled_graphs - results[WARM_UP_STEPS - 1].compiled_graphs,
        device_taken_bytes=device_taken_bytes,
        host_bytes=host_bytes,
        host_taken_bytes=host_taken_bytes,
        arena_bytes=ArenaMap.of(placement.tier).total_bytes,
        nvme_read_bytes=_moved(spans, Lane.NVME_READ, start_s, end_s) // steps,
        nvme_write_bytes=_moved(spans, Lane.NVME_WRITE, start_s, end_s) // steps,
        first_step_s=ends_s[0] - started_s,
        loss=results[-1].loss,
        grad_norm=results[-1].grad_norm,
    )


def device_bytes_in_use() -> int:
    """What the GPU's driver says is taken, of all processes together; 0 where `nvidia-smi` does not answer."""
    question = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True, timeout=30)
        return int(answer.stdout.split()[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _moved(spans: list[LaneSpan], lane: Lane, start_s: float, end_s: float) -> int:
    """Bytes of operations of a lane that ended within a window."""
    return sum(span.num_bytes for span in spans if span.lane is lane and start_s < span.end_s <= end_s)


def _updated_on_host(placement: Placement) -> int:
    """Parameters that the optimizer actors update."""
    on_device = placement.schedule.device_updates
    return sum(layer.num_parameters for layer in placement.tier.model.layers if layer.index not in on_device)


def _update_rate(spans: list[LaneSpan], parameters: int, steps: int) -> float:
    """Parameters updated a second while the pool is at work: its actors work side by side."""
    updates = [span for span in spans if span.lane is Lane.UPDATE]
    actors = len({span.actor for span in updates})
    busy_s = sum(span.end_s - span.start_s for span in updates) / actors
    return parameters * steps / busy_s / 1e9
