"""More memory that makes a model fit: a limit raised, or another machine. Only what does is told. Pure."""

from __future__ import annotations

from dataclasses import replace

from pipeline.memory.footprint import GIB, MIB, Place
from pipeline.memory.least import amount, least_of
from pipeline.memory.placement_request import Placement, PlacementRequest
from pipeline.memory.placement_search import solve
from pipeline.memory.room import DEVICE_RESERVE, UNKNOWN_BYTES, Room
from tiers.quantities import shown_bytes

GPU_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 288)
"""Memory of GPUs as their makers call it."""

FREE_OF_A_GB = 0.97 * GIB
"""What is free at least of each: of a 24 GB card 23.5 GiB, of 80 GB 79, of 141 GB 139."""


def fits(request: PlacementRequest, room: Room) -> bool:
    """Whether a placement is found."""
    return isinstance(solve(request, room.budget(request.processes)), Placement)


def more_room(request: PlacementRequest, room: Room) -> list[str]:
    """Single changes, a limit of the recipe before a machine with more."""
    drive = _limit(request, room, Place.NVME) or _drive(request, room)
    memory = _limit(request, room, Place.RAM) or _machine(request, room)
    device = _limit(request, room, Place.DEVICE) or (_gpu(request, room) if room.cuda else None)
    return [text for text in (drive, memory, device) if text is not None]


def more_of_both(request: PlacementRequest, room: Room) -> list[str]:
    """Two changes that make it fit together, the device's first; empty where there are none."""
    budget = replace(room.budget(request.processes), ram_bytes=UNKNOWN_BYTES)
    least = least_of(request, budget, Place.DEVICE)
    if least is None:
        return []
    needed = amount(least, Place.DEVICE)
    gpu_gib = _in_tenths(needed)
    if not room.cuda or (room.gpu_limit is not None and room.gpu_bytes >= _free_for(needed)):
        first, roomier = f"memory.gpu_gib = {gpu_gib:g}", replace(room, gpu_limit=int(gpu_gib * GIB))
    else:
        kind = _gpu_kind(_free_for(needed))
        if kind is None:
            return []
        first, roomier = kind, replace(room, gpu_bytes=_free_for(needed), gpu_limit=None)
        first += " and memory.gpu_gib left out" if room.gpu_limit is not None else ""
    second = [text for text in more_room(request, roomier) if "GPU" not in text and "gpu_gib" not in text]
    return [first, second[0]] if second else []


def _limit(request: PlacementRequest, room: Room, place: Place) -> str | None:
    """A key of `[memory]` that may be raised, on this very machine."""
    budget = room.budget(request.processes)
    limits = {Place.RAM: room.ram_limit, Place.DEVICE: room.gpu_limit, Place.NVME: room.nvme_limit}
    if not room.cuda and place is Place.DEVICE:
        # Not a limit alone: it is also what is set aside of host memory, and may be more than is needed.
        budget = replace(budget, ram_bytes=UNKNOWN_BYTES, gpu_bytes=0)
    elif limits[place] is None:
        return None
    least = least_of(request, budget, place)
    if least is None:
        return None
    gib = _in_tenths(amount(least, place))
    key, roomier = {
        Place.RAM: ("ram_gib", replace(room, ram_limit=int(gib * GIB))),
        Place.DEVICE: ("gpu_gib", replace(room, gpu_limit=int(gib * GIB))),
        Place.NVME: ("nvme_gib", replace(room, nvme_limit=int(gib * GIB))),
    }[place]
    return f"memory.{key} = {gib:g}" if fits(request, roomier) else None


def _drive(request: PlacementRequest, room: Room) -> str | None:
    least = least_of(request, room.budget(request.processes), Place.NVME)
    if least is None:
        return None
    num_bytes = as_shown(amount(least, Place.NVME))
    if not fits(request, replace(room, nvme_bytes=num_bytes, nvme_limit=None)):
        return None
    unlimited = " and memory.nvme_gib left out" if room.nvme_limit is not None else ""
    return f"memory.nvme_dir on a drive with {shown_bytes(num_bytes)} free{unlimited}"


def _machine(request: PlacementRequest, room: Room) -> str | None:
    """More host memory, to a 256th; where the CPU stands in for a GPU its share grows too."""
    if room.host_bytes >= UNKNOWN_BYTES:
        return None
    least = least_of(request, room.budget(request.processes), Place.RAM)
    limit, allowed = room.ram_limit, ""
    if least is not None and limit is not None and limit < least.arena_bytes:
        gib = _in_tenths(least.arena_bytes)
        limit, allowed = int(gib * GIB), f" and memory.ram_gib = {gib:g}"

    def suffices(host_bytes: int) -> bool:
        return fits(request, replace(room, host_bytes=host_bytes, ram_limit=limit))

    low = high = room.host_bytes
    while not suffices(high):
        if high > UNKNOWN_BYTES >> 10:
            return None
        low, high = high, 2 * max(high, GIB)
    while high - low > max(MIB, high >> 8):
        low, high = (low, (low + high) // 2) if suffices((low + high) // 2) else ((low + high) // 2, high)
    host_bytes = as_shown(high)
    return f"a machine with {shown_bytes(host_bytes)} of host memory free{allowed}" if suffices(host_bytes) else None


def _gpu(request: PlacementRequest, room: Room) -> str | None:
    least = least_of(request, room.budget(request.processes), Place.DEVICE)
    if least is None or room.gpu_bytes >= UNKNOWN_BYTES:
        return None
    free_bytes = _free_for(amount(least, Place.DEVICE))
    kind = _gpu_kind(free_bytes)
    if kind is None or not fits(request, replace(room, gpu_bytes=free_bytes, gpu_limit=None)):
        return None
    unlimited = " and memory.gpu_gib left out" if room.gpu_limit is not None else ""
    return f"{kind}{unlimited} (this one has {shown_bytes(room.gpu_bytes)})"


def _free_for(budget_bytes: int) -> int:
    """Free device memory of which the budget may be so much, as it is shown."""
    return as_shown(int(budget_bytes / (1 - DEVICE_RESERVE)) + 1)


def _gpu_kind(free_bytes: int) -> str | None:
    """The smallest GPU that has so much free; None where there is none."""
    size = next((size for size in GPU_GB if size * FREE_OF_A_GB >= free_bytes), None)
    return None if size is None else f"a GPU with {shown_bytes(free_bytes)} free, such as one of {size} GB"


def _in_tenths(num_bytes: int) -> float:
    """GiB, rounded up to what is written."""
    return -(-num_bytes * 10 // GIB) / 10


def as_shown(num_bytes: int) -> int:
    """The next size of which `shown_bytes` tells all: what is read is enough, too."""
    unit = next(unit for below, unit in _SHOWN_UNITS if num_bytes < below)
    return -(-num_bytes // unit) * unit


_SHOWN_UNITS = ((GIB, MIB), (999 * GIB, GIB // 10), (9_999 * GIB, GIB), (UNKNOWN_BYTES * 2, 2**40 // 10))
"""Below which size, and what it is then a multiple of."""
