"""Says why a model does not fit, and which single change of a recipe or a machine makes it fit: each one is tried."""

from __future__ import annotations

from pipeline.memory.footprint import TIER_NAMES, Place, total
from pipeline.memory.host_footprint import STAND_IN, process_terms
from pipeline.memory.least import amount, least_of
from pipeline.memory.placement_request import PlacementRequest, Shortage
from pipeline.memory.request_changes import request_changes
from pipeline.memory.room import UNKNOWN_BYTES, Room
from pipeline.memory.roomier import as_shown, fits, more_of_both, more_room
from tiers.quantities import shown_bytes, shown_count


def refusal(request: PlacementRequest, room: Room, shortage: Shortage) -> str:
    """What was needed and available, and each single change that makes it fit."""
    budget, place = room.budget(request.processes), shortage.place
    least = least_of(request, budget, place)
    # Where no amount of one place is enough, what the first way lacks.
    needed = as_shown(shortage.needed_bytes if least is None else amount(least, place))
    terms = shortage.terms if least is None else least.terms
    # Of host memory the budget is that of model state.
    beside = {STAND_IN, *(term.name for term in process_terms(1, request.processes))}
    counted = [term for term in terms if term.place is place and term.name not in beside]
    available = {Place.RAM: budget.ram_bytes, Place.DEVICE: budget.gpu_bytes, Place.NVME: budget.nvme_bytes}[place]
    largest = sorted(counted, key=lambda term: -term.num_bytes)[:4]
    return (
        f"a model of {shown_count(request.model.num_parameters)} parameters does not fit: {TIER_NAMES[place]} "
        f"needs {shown_bytes(needed)}, the budget is {shown_bytes(available)}{_origin(request, room, place)} (largest: "
        + ", ".join(f"{term.name} {shown_bytes(term.num_bytes)}" for term in largest)
        + "). "
        + _remedies(request, room)
    )


def _origin(request: PlacementRequest, room: Room, place: Place) -> str:
    """Where a budget comes from, where that is not the recipe's own figure."""
    if place is Place.RAM and room.host_bytes < UNKNOWN_BYTES and room.ram_limit is None:
        processes = shown_bytes(total(process_terms(0, request.processes)))
        stand_in = (
            "" if room.cuda else f" and {shown_bytes(room.budget(request.processes).gpu_bytes)} stand in for a GPU"
        )
        return f" of {shown_bytes(room.host_bytes)} free, the run's processes take {processes}{stand_in}"
    if place is Place.DEVICE and not room.cuda:
        return " of host memory, for the CPU stands in for a GPU"
    return ""


def _remedies(request: PlacementRequest, room: Room) -> str:
    """Changes, each alone, under which the placement is found; two together where none does."""
    singles = [*more_room(request, room), *request_changes(request, lambda changed: fits(changed, room))]
    if singles:
        return "Any one of these makes it fit: " + "; ".join(singles)
    both = more_of_both(request, room)
    if both:
        return "No single change makes it fit, these together do: " + " and ".join(both)
    return "No machine known makes it fit as it is: train a smaller model, or with shorter sequences"
