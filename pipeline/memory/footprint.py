"""The account of a run's memory: every byte it will hold, term by term, before anything is allocated.

`host_footprint` and `device_footprint` make the terms, `placement` fits them into a budget, `tasks.plan` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MIB = 2**20
GIB = 2**30


class Place(StrEnum):
    """Where bytes are held."""

    RAM = "ram"
    DEVICE = "device"
    NVME = "nvme"


TIER_NAMES = {Place.RAM: "host memory", Place.DEVICE: "device memory", Place.NVME: "NVMe"}
"""What people call the places."""


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the account."""

    place: Place
    name: str
    num_bytes: int
    why: str
    """How the figure comes about."""


def total(terms: Iterable[Term]) -> int:
    """Bytes of all terms."""
    return sum(term.num_bytes for term in terms)
