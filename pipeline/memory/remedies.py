"""Says why a model does not fit, and which single change of a recipe or a machine makes it fit: each one is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeline.memory.footprint import GIB, TIER_NAMES, Place
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest, Shortage
from pipeline.memory.placement_search import solve
from tiers.quantities import shown_bytes


def refusal(request: PlacementRequest, budget: MemoryBudget, shortage: Shortage) -> str:
    """What was needed and available, and each single change that makes it fit."""
    available = {
        Place.RAM: budget.ram_bytes,
        Place.DEVICE: budget.gpu_bytes,
        Place.NVME: budget.nvme_bytes,
    }[shortage.place]
    largest = sorted(shortage.terms, key=lambda term: -term.num_bytes)[:4]
    return (
        f"a model of {request.model.num_parameters / 1e9:.2f} B parameters does not fit: {TIER_NAMES[shortage.place]} "
        f"needs {shown_bytes(shortage.needed_bytes)}, the budget is {shown_bytes(available)} (largest: "
        + ", ".join(f"{term.name} {shown_bytes(term.num_bytes)}" for term in largest)
        + "). "
        + _remedies(request, budget)
    )


def _remedies(request: PlacementRequest, budget: MemoryBudget) -> str:
    """Changes, each alone, under which the placement is found."""
    found: dict[str, str] = {}
    for changed, roomier, describe in _trials(request, budget):
        fit = None if describe.knob in found else solve(changed, roomier)
        if isinstance(fit, Placement):
            found[describe.knob] = describe.text(fit)
    if found:
        return "Any one of these makes it fit: " + "; ".join(found.values())
    return "No single setting makes it fit: raise memory.ram_gib and memory.nvme_gib together, or train a smaller model"


@dataclass(frozen=True, slots=True)
class _Remedy:
    """A setting and how to tell the value it needs."""

    knob: str
    text: Callable[[Placement], str]


def _trials(
    request: PlacementRequest, budget: MemoryBudget
) -> Iterator[tuple[PlacementRequest, MemoryBudget, _Remedy]]:
    unlimited = 2**60

    def drive(fit: Placement) -> str:
        return f"memory.nvme_dir on a drive with {shown_bytes(fit.used(Place.NVME))} free (memory.nvme_gib)"

    def ram(fit: Placement) -> str:
        host = shown_bytes(fit.used(Place.RAM) + GIB)
        return f"memory.ram_gib = {fit.arena_bytes / GIB + 0.05:.1f} (on a machine with {host} free)"

    def constant(text: str) -> Callable[[Placement], str]:
        return lambda fit: text

    yield request, replace(budget, nvme_bytes=unlimited), _Remedy("memory.nvme_gib", drive)
    yield (
        request,
        replace(budget, ram_bytes=_least_ram(request, budget)),
        _Remedy("memory.ram_gib", ram),
    )
    yield (
        request,
        replace(budget, gpu_bytes=unlimited),
        _Remedy("memory.gpu_gib", lambda fit: f"memory.gpu_gib = {_required_gpu_gib(request, fit)}"),
    )
    if request.clip:
        unclipped = constant("optimizer.max_grad_norm = 0 (no gradients held)")
        yield replace(request, clip=False), budget, _Remedy("optimizer.max_grad_norm", unclipped)
    step = request.step
    for micro_batch in _halves(step.micro_batch):
        smaller = replace(request, step=replace(step, micro_batch=micro_batch))
        knob = "train.micro_batch"
        yield smaller, budget, _Remedy(knob, constant(f"{knob} = {micro_batch}"))
    for sequences in _halves(step.sequences):
        smaller = replace(request, step=replace(step, sequences=sequences))
        knob = "train.sequences_per_step"
        yield smaller, budget, _Remedy(knob, constant(f"{knob} = {sequences}"))


def _least_ram(request: PlacementRequest, budget: MemoryBudget) -> int:
    """The least arena with which the drive, if there is one, suffices; more than any machine has where none does."""
    low, unlimited = budget.ram_bytes, 2**60
    fit = solve(request, replace(budget, ram_bytes=unlimited))
    if not isinstance(fit, Placement):
        return unlimited
    high = fit.arena_bytes
    while high - low > GIB // 16:
        middle = (low + high) // 2
        if isinstance(solve(request, replace(budget, ram_bytes=middle)), Placement):
            high = middle
        else:
            low = middle
    return high


def _required_gpu_gib(request: PlacementRequest, fit: Placement) -> int:
    """The least device budget, in whole GiB, that works with no more host memory than `fit` uses."""
    low, high = 1, -(-fit.used(Place.DEVICE) // GIB)
    roomy = replace(fit.budget, gpu_bytes=0)
    while low < high:
        middle = (low + high) // 2
        if isinstance(solve(request, replace(roomy, gpu_bytes=middle * GIB)), Placement):
            high = middle
        else:
            low = middle + 1
    return high


def _halves(value: int) -> list[int]:
    """Smaller powers-of-two fractions of `value`, largest first."""
    halves: list[int] = []
    while value > 1:
        value //= 2
        halves.append(value)
    return halves
