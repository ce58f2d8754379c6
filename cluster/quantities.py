"""Amounts of Ray's resources as people read them."""

from __future__ import annotations

_BYTES = frozenset({"memory", "object_store_memory"})
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(name: str, value: float) -> str:
    """A resource with how much there is of it, e.g. `CPU 16`, `memory 22.3 GiB`, `object_store_memory 256 MiB`."""
    if name not in _BYTES:
        return f"{name} {value:g}"
    unit_bytes, unit = next((each for each in _UNITS if value >= each[0]), (1, "B"))
    number = value / unit_bytes
    return f"{name} {number:,.0f} {unit}" if number >= 99.95 or number == int(number) else f"{name} {number:.1f} {unit}"
