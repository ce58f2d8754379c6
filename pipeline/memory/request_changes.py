"""Single keys of a recipe, other than those of memory itself, that ask for less; only those that do are told. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeline.memory.placement_request import PlacementRequest
from pipeline.memory.shapes import StepShape
from tiers.layout import ElementType, Precision


def request_changes(request: PlacementRequest, fits: Callable[[PlacementRequest], bool]) -> Iterator[str]:
    """Each key, with the value nearest to the request's under which it fits."""
    for key, changed in _left_out(request):
        if fits(changed):
            yield f"memory.{key} left out"
    yield from _lower(
        "memory.decoder_slots", request.decoder_slots, lambda slots: fits(replace(request, decoder_slots=slots))
    )
    processes = request.processes
    yield from _lower(
        "memory.optimizer_actors",
        processes.optimizer_actors,
        lambda actors: fits(replace(request, processes=replace(processes, optimizer_actors=actors))),
    )
    wide = request.model.precision is Precision.BF16 and request.outgoing_type is ElementType.FLOAT32
    if wide and fits(replace(request, gradient_type=None)):
        yield 'precision.gradients = "auto"'
    if request.clip and fits(replace(request, clip=False)):
        yield "optimizer.max_grad_norm = 0 (no gradients held)"
    step = request.step
    smaller = [replace(step, micro_batch=size) for size in _halves(step.micro_batch) if step.sequences % size == 0]
    yield from _first("train.micro_batch", request, smaller, fits)
    fewer = [replace(step, sequences=count) for count in _halves(step.sequences) if count % step.micro_batch == 0]
    yield from _first("train.sequences_per_step", request, fewer, fits)


def _left_out(request: PlacementRequest) -> Iterator[tuple[str, PlacementRequest]]:
    """What the recipe fixes and the plan would choose."""
    if request.mlp_chunk_tokens is not None:
        yield "mlp_chunk_tokens", replace(request, mlp_chunk_tokens=None)
    if request.boundary_every is not None:
        yield "boundary_every", replace(request, boundary_every=None)
    if request.waves is not None:
        yield "waves", replace(request, waves=None)


def _lower(key: str, value: int, fits: Callable[[int], bool]) -> Iterator[str]:
    """The largest smaller number that does; fewer never take more."""
    count = bisect_left(range(1, value), True, key=lambda tried: not fits(tried))
    if count and fits(count):
        yield f"{key} = {count}"


def _first(
    key: str, request: PlacementRequest, steps: list[StepShape], fits: Callable[[PlacementRequest], bool]
) -> Iterator[str]:
    """The first of the steps that fits, if it has a micro-batch for each wave that the recipe asks for."""
    for step in steps:
        if step.micro_batches >= (request.waves or 1) and fits(replace(request, step=step)):
            yield f"{key} = {step.micro_batch if key.endswith('micro_batch') else step.sequences}"
            return


def _halves(value: int) -> list[int]:
    """Smaller powers-of-two fractions of `value`, largest first."""
    halves: list[int] = []
    while value > 1:
        value //= 2
        halves.append(value)
    return halves
