"""Terms of host memory: the arena by region, and what the processes of a run hold beside it."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.memory.footprint import MIB, Place, Term, total
from pipeline.memory.shapes import ProcessShape
from tiers.arena_map import ArenaMap, Extent, TierPlan
from tiers.layout import Buffer, state_buffers

COMPILER_WORKERS = 4
"""Processes that compile kernels at the first step. Inductor's own number is that of the cores: each takes host memory
that the model needs, for a few seconds saved once."""


def arena_terms(tier: TierPlan) -> tuple[Term, ...]:
    """Account of the arena by region; adds up to its exact size."""
    arena = ArenaMap.of(tier)
    homes = tier.homes
    own = [home.weight_slot is None for home in homes]
    state_own = [home.state_slot is None for home in homes]
    terms = [
        _ram("weights", _distinct(arena.weights, own), "what the device streams, of layers at home in RAM"),
        _ram("weight staging slots", _distinct(arena.weights, [not x for x in own]), "NVMe -> RAM -> device, pinned"),
        _ram("gradients", _united(arena.gradients), _gradient_reason(tier)),
        _ram(
            "gradient sums",
            sum(sums.num_bytes - arena.gradients[layer].num_bytes for layer, sums in arena.gradient_sums.items()),
            "gradients are fp32 until the last wave, pinned",
        ),
    ]
    for buffer in state_buffers(tier.model.precision):
        extents = [state[buffer] for state in arena.states]
        terms.append(_ram(_BUFFER_NAMES[buffer], _distinct(extents, state_own), "optimizer state at home in RAM"))
    slots = sum(
        _distinct([state[buffer] for state in arena.states], [not x for x in state_own])
        for buffer in state_buffers(tier.model.precision)
    )
    masters = [state[Buffer.WEIGHT] for state in arena.states]
    slots += _distinct(masters, [not x for x in own])
    activations = arena.activations.num_bytes if arena.activations else 0
    terms += [
        _ram("state staging slots", slots, "NVMe -> RAM -> update -> NVMe"),
        _ram("pinned activations", activations, "boundary activations beyond the device budget"),
    ]
    terms.append(
        _ram("page rounding", arena.total_bytes - sum(term.num_bytes for term in terms), "buffers start pages")
    )
    return tuple(term for term in terms if term.num_bytes)


def process_terms(arena_bytes: int, processes: ProcessShape) -> tuple[Term, ...]:
    """Account of what the processes hold beside the arena."""
    actors = processes.optimizer_actors
    workers = "1 process" if actors == 1 else f"{actors} processes"
    tables = arena_bytes * page_mappings(processes) // 512
    terms = [
        _ram(
            "page tables",
            tables,
            "8 bytes a 4 KiB page and process that touches it"
            + (", and lists of pinned pages" if processes.cuda else ""),
        ),
        _ram("Ray services", RAY_SERVICES_BYTES, "GCS, raylet, dashboard and its agents, object store in use"),
        _ram("driver", DRIVER_BYTES, "coordinator, data loader, tokenizer"),
        _ram("tier actors", TIER_ACTORS_BYTES, "ParameterTier and Prefetcher"),
        _ram("optimizer actors", actors * OPTIMIZER_ACTOR_BYTES, f"{workers} with Numba"),
        _ram(
            "compute actor",
            COMPUTE_CUDA_BYTES if processes.cuda else COMPUTE_CPU_BYTES,
            "PyTorch and its CUDA libraries" if processes.cuda else "PyTorch",
        ),
    ]
    if processes.compiled and processes.cuda:
        terms.append(_ram("compiler", COMPILER_BYTES, f"{COMPILER_WORKERS} worker processes of Inductor"))
        # Torch's allocator of pinned memory rounds up to powers of two.
        pinned = 1 << (processes.timed_bytes - 1).bit_length() if processes.timed_bytes else 0
        terms.append(_ram(TIMED_KERNELS, pinned, "pinned copies of what Inductor times kernels on, in the first step"))
    return tuple(term for term in terms if term.num_bytes)


def staging_terms(num_bytes: int) -> tuple[Term, ...]:
    """Account of the copies that a checkpoint may hold while training goes on."""
    held = num_bytes + num_bytes // 512
    return (_ram(CHECKPOINT_STAGING, held, "copies of what is not written when it is updated"),) if num_bytes else ()


TIMED_KERNELS = "timed kernels"
"""Term of what Compute gives back after the first step: before Inductor times a kernel that changes an activation in
place, it copies the activation to pinned memory where the device seems full. Of 7B and a sequence of 131,072 tokens
8 GiB were taken beyond what processes held: the product of gate and up, 4.6 GiB, rounded up."""

CHECKPOINT_STAGING = "checkpoint staging"
"""Term of what is held only while a checkpoint is written."""


def stand_in_terms(device: Iterable[Term]) -> tuple[Term, ...]:
    """Account of what a GPU would hold where the CPU stands in for it: the same bytes, of host memory."""
    return (_ram(STAND_IN, total(device), "what a GPU would hold, for the CPU stands in for it"),)


STAND_IN = "in place of device memory"

PAGE_TABLE_MAPPINGS = 4
"""ParameterTier, Prefetcher and Compute touch all of the arena, the optimizers together all of it once."""

PINNED_PAGE_MAPPINGS = 3
"""What the GPU's driver and the kernel keep of pinned pages, in the same measure: of an arena of 96 GiB 0.6 GiB."""


def page_mappings(processes: ProcessShape) -> int:
    """Times 8 bytes that a 4 KiB page of the arena costs beside itself."""
    return PAGE_TABLE_MAPPINGS + (PINNED_PAGE_MAPPINGS if processes.cuda else 0)


NOT_IN_HELD_BYTES = ("page tables", "Ray services", "compiler", TIMED_KERNELS)
"""Terms beyond a step's `host_bytes`, which are the arena and the private memory of driver and actors."""

RUNNING_BEFORE_ALLOCATION = ("Ray services", "driver")
"""Terms whose memory is held already when the first actor starts: what a measurement from then on does not see."""

# Proportional set sizes, so that shared libraries count once: Ray 2.60 with its dashboard, torch 2.13, measured on a
# 2-core machine without a GPU after every import (Ray 630 MiB, driver 337, tier actors 136, an optimizer 104, Compute
# 320, Inductor with 4 idle workers 240), with room for what they allocate at work. On an H200 with torch 2.11 and 4
# optimizers, driver and actors held 2.8 GiB in steps of 7B and of 3B (Compute 1.3); all that became unavailable beside
# the arena were 6.1 GiB at 7B and 4.2 at 3B in a run that compiled, 4.2 and 3.5 in one that found its graphs compiled.
RAY_SERVICES_BYTES = 800 * MIB
DRIVER_BYTES = 600 * MIB
TIER_ACTORS_BYTES = 320 * MIB
OPTIMIZER_ACTOR_BYTES = 220 * MIB
COMPUTE_CPU_BYTES = 600 * MIB
COMPUTE_CUDA_BYTES = 1900 * MIB
COMPILER_BYTES = 950 * MIB

_BUFFER_NAMES = {
    Buffer.WEIGHT_LOW: "master low half",
    Buffer.EXP_AVG: "first moment",
    Buffer.EXP_AVG_SQ: "second moment",
}


def _ram(name: str, num_bytes: int, why: str) -> Term:
    return Term(Place.RAM, name, num_bytes, why)


def _distinct(extents: Iterable[Extent], chosen: Iterable[bool] | None = None) -> int:
    """Bytes of the chosen extents, those that share a slot counted once, at the largest."""
    sizes: dict[int, int] = {}
    extents = list(extents)
    for extent, counts in zip(extents, chosen or [True] * len(extents), strict=True):
        if counts:
            sizes[extent.offset_bytes] = max(sizes.get(extent.offset_bytes, 0), extent.num_bytes)
    return sum(sizes.values())


def _united(extents: Iterable[Extent]) -> int:
    """Bytes that any of the extents covers."""
    covered, end = 0, 0
    for extent in sorted(extents):
        start, end = max(end, extent.offset_bytes), max(end, extent.offset_bytes + extent.num_bytes)
        covered += max(0, end - start)
    return covered


def _gradient_reason(tier: TierPlan) -> str:
    slots = len({slot for home in tier.homes for slot in home.ram_gradient})
    own = sum(not home.gradient_on_device for home in tier.homes)
    if tier.gradient_sums:
        return f"of {slots} layers, from wave to wave and until the update, pinned"
    if slots == own:
        return f"of {own} layers, held until the global norm is known, pinned"
    large = ", the vocabulary takes all of them" if any(home.gradient_span > 1 for home in tier.homes) else ""
    return f"{slots} slots, each free again after its update{large}, pinned"
