"""Decides, before the run, in which tier every layer's weights, optimizer state and gradients live.

Pure policy. RAM first; then the state of as few decoder layers as possible moves to NVMe, spread evenly so that the
drive works all the time; then their weights, which cross twice a step. Nothing here allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pipeline.footprint import (
    GIB,
    PAGE_TABLE_MAPPINGS,
    RUNNING_BEFORE_ALLOCATION,
    ComputeShape,
    Place,
    ProcessShape,
    StepShape,
    Term,
    arena_terms,
    device_terms,
    process_terms,
    total,
)
from pipeline.homes import candidates
from pipeline.schedule import SchedulePlan
from tiers.layout import (
    ArenaMap,
    Buffer,
    ElementType,
    LayerHome,
    LayerKind,
    ModelLayout,
    TierPlan,
    buffer_types,
    state_buffers,
)
from tiers.scratch import scratch_bytes


class PlacementError(ValueError):
    """The model does not fit the memory it may use. The message tells needed, available and what makes it fit."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a run may use."""

    ram_bytes: int
    """Host memory for model state: the arena. What the processes take beside it is `process_terms`."""
    gpu_bytes: int
    nvme_bytes: int = 0
    """Free room of `[memory] nvme_dir`; 0 where there is none."""


@dataclass(frozen=True)
class PlacementRequest:
    """Everything the decision depends on, besides the budget."""

    model: ModelLayout
    compute: ComputeShape
    step: StepShape
    clip: bool
    """Global clipping holds every gradient until the norm is known."""
    processes: ProcessShape = field(default_factory=ProcessShape)
    staging_slots: int = 3
    """RAM slots that the layers on NVMe share, for weights and for state each; 2 are tried where 3 do not fit."""
    decoder_slots: int = 2
    gradient_type: ElementType | None = None
    """None means that of the precision."""


@dataclass(frozen=True)
class Placement:
    """Where everything lives, and the account of it."""

    tier: TierPlan
    schedule: SchedulePlan
    spilled_boundaries: int
    """Decoder layers, the first ones, whose inputs wait for their backward in pinned RAM."""
    budget: MemoryBudget
    terms: tuple[Term, ...]

    @property
    def arena_bytes(self) -> int:
        """Host memory for model state."""
        return ArenaMap.of(self.tier).total_bytes

    def used(self, place: Place) -> int:
        """Bytes that the run holds in `place`."""
        return total(term for term in self.terms if term.place is place)


def place(request: PlacementRequest, budget: MemoryBudget) -> Placement:
    """Place the model within `budget`.

    Raises:
        PlacementError: It does not fit; the message names needed and available bytes of each tier and what to change.
    """
    found = _solve(request, budget)
    if isinstance(found, Placement):
        return found
    raise PlacementError(_refusal(request, budget, found))


def ram_for_state(available_bytes: int, processes: ProcessShape) -> int:
    """The most an arena may take of `available_bytes` (min of MemAvailable and the cgroup's headroom).

    Leaves room for the run's processes and page tables, and a reserve for the rest of the machine.
    """
    reserve = min(GIB, available_bytes // 16)
    fixed = total(process_terms(0, processes))
    return max(0, (available_bytes - reserve - fixed) * 512 // (512 + PAGE_TABLE_MAPPINGS))


def preflight(
    placement: Placement, *, host_available_bytes: int, gpu_free_bytes: int, nvme_free_bytes: int = 0
) -> None:
    """Hold a placement against what the machine has at this moment, before anything is allocated.

    Args:
        placement: What the run is about to allocate.
        host_available_bytes: min(MemAvailable, cgroup headroom): `tiers.host_memory.available_host_bytes()`, asked
            in the driver with Ray running, so that what these two hold already is not counted again.
        gpu_free_bytes: Free device memory; the budget's on a machine without a GPU.
        nvme_free_bytes: Free bytes of the NVMe directory's file system.

    Raises:
        PlacementError: A tier has less than the placement needs.
    """
    running = total(term for term in placement.terms if term.name in RUNNING_BEFORE_ALLOCATION)
    needed = {where: placement.used(where) for where in Place} | {Place.RAM: placement.used(Place.RAM) - running}
    free = {Place.RAM: host_available_bytes, Place.DEVICE: gpu_free_bytes, Place.NVME: nvme_free_bytes}
    short = [
        f"{_NAMES[where]}: needs {_gib(needed[where])}, free now {_gib(free[where])} (free some, or lower "
        f"{_KNOBS[where]} so that less is placed there)"
        for where in Place
        if needed[where] > free[where]
    ]
    if short:
        raise PlacementError("this machine has less free memory than the run needs: " + "; ".join(short))


_KNOBS = {Place.RAM: "memory.ram_gib", Place.DEVICE: "memory.gpu_gib", Place.NVME: "memory.nvme_gib"}
_NAMES = {Place.RAM: "host memory", Place.DEVICE: "device memory", Place.NVME: "NVMe"}


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A tier that cannot hold what it must."""

    place: Place
    needed_bytes: int
    terms: tuple[Term, ...]


def _solve(request: PlacementRequest, budget: MemoryBudget) -> Placement | _Shortage:
    """The first of the candidates, in order of preference, that fits."""
    spilled, device = _place_device(request, budget.gpu_bytes)
    if total(device) > budget.gpu_bytes:
        return _Shortage(Place.DEVICE, total(device), device)
    pinned_bytes = spilled * request.step.tokens * request.compute.hidden_size * _weight_bytes(request.model)
    least: TierPlan | None = None
    least_bytes = 0
    for homes in candidates(
        request.model, clip=request.clip, staging_slots=request.staging_slots, nvme=budget.nvme_bytes > 0
    ):
        tier = TierPlan(request.model, homes, _gradient_type(request), pinned_bytes)
        arena_bytes = ArenaMap.of(tier).total_bytes
        if arena_bytes > budget.ram_bytes:
            if least is None or arena_bytes < least_bytes:
                least, least_bytes = tier, arena_bytes
            continue
        nvme = _nvme_terms(tier)
        if total(nvme) > budget.nvme_bytes:
            return _Shortage(Place.NVME, total(nvme), nvme)
        host = (*arena_terms(tier), *process_terms(arena_bytes, request.processes))
        return Placement(tier, _schedule(request, homes), spilled, budget, (*host, *device, *nvme))
    assert least is not None
    return _Shortage(Place.RAM, least_bytes, arena_terms(least))


def _place_device(request: PlacementRequest, gpu_bytes: int) -> tuple[int, tuple[Term, ...]]:
    """How many decoder layers' inputs spill to pinned RAM, the fewest that fit, and the account of the device."""
    decoders = sum(layer.kind is LayerKind.DECODER for layer in request.model.layers)
    for spilled in range(decoders + 1):
        device = device_terms(
            request.model,
            request.compute,
            request.step,
            _gradient_type(request).bytes,
            decoder_slots=request.decoder_slots,
            spilled_boundaries=spilled,
            compiled=request.processes.compiled,
        )
        if total(device) <= gpu_bytes:
            break
    return spilled, device


def _weight_bytes(model: ModelLayout) -> int:
    return buffer_types(model.precision)[Buffer.WEIGHT].bytes


def _gradient_type(request: PlacementRequest) -> ElementType:
    return buffer_types(request.model.precision, request.gradient_type)[Buffer.GRADIENT]


def _schedule(request: PlacementRequest, homes: tuple[LayerHome, ...]) -> SchedulePlan:
    return SchedulePlan(
        kinds=tuple(layer.kind for layer in request.model.layers),
        tied=request.model.tied,
        clip=request.clip,
        decoder_slots=request.decoder_slots,
        weight_slots=tuple(home.weight_slot for home in homes),
        state_slots=tuple(home.state_slot for home in homes),
        gradient_slots=tuple(home.gradient_slot for home in homes),
    )


def _nvme_terms(tier: TierPlan) -> tuple[Term, ...]:
    """Account of the working files."""
    types = buffer_types(tier.model.precision)
    state_bytes = sum(types[buffer].bytes for buffer in state_buffers(tier.model.precision))
    pairs = list(zip(tier.model.layers, tier.homes, strict=True))
    weights = sum(layer.numel for layer, home in pairs if home.weight_slot is not None) * types[Buffer.WEIGHT].bytes
    states = sum(layer.numel for layer, home in pairs if home.state_slot is not None) * state_bytes
    terms = (
        Term(Place.NVME, "weights", weights, "read twice for the device, once for the update, written once a step"),
        Term(Place.NVME, "optimizer state", states, "read and written once a step"),
        Term(Place.NVME, "indexes", scratch_bytes(tier) - weights - states, "checksums of chunks, alignment"),
    )
    return tuple(term for term in terms if term.num_bytes)


def _refusal(request: PlacementRequest, budget: MemoryBudget, shortage: _Shortage) -> str:
    """What was needed and available, and each single change that makes it fit."""
    available = {
        Place.RAM: budget.ram_bytes,
        Place.DEVICE: budget.gpu_bytes,
        Place.NVME: budget.nvme_bytes,
    }[shortage.place]
    largest = sorted(shortage.terms, key=lambda term: -term.num_bytes)[:4]
    return (
        f"a model of {request.model.num_parameters / 1e9:.2f} B parameters does not fit: {_NAMES[shortage.place]} "
        f"needs {_gib(shortage.needed_bytes)}, the budget is {_gib(available)} (largest: "
        + ", ".join(f"{term.name} {_gib(term.num_bytes)}" for term in largest)
        + "). "
        + _remedies(request, budget)
    )


def _remedies(request: PlacementRequest, budget: MemoryBudget) -> str:
    """Changes, each alone, under which the placement is found."""
    found: dict[str, str] = {}
    for changed, roomier, describe in _trials(request, budget):
        fit = None if describe.knob in found else _solve(changed, roomier)
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
        return f"memory.nvme_dir on a drive with {_gib(fit.used(Place.NVME))} free (memory.nvme_gib)"

    def ram(fit: Placement) -> str:
        host = _gib(fit.used(Place.RAM) + GIB)
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
    low, high = budget.ram_bytes, 2**60
    if not isinstance(_solve(request, replace(budget, ram_bytes=high)), Placement):
        return high
    while high - low > GIB // 16:
        middle = (low + high) // 2
        if isinstance(_solve(request, replace(budget, ram_bytes=middle)), Placement):
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
        if isinstance(_solve(request, replace(roomy, gpu_bytes=middle * GIB)), Placement):
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
