"""Bytes, seconds and counts as people read them: in the unit that suits their size, everywhere the same."""

from __future__ import annotations

import math

_BYTE_UNITS = ((10_000 * 2**30, 2**40, "TiB"), (2**30, 2**30, "GiB"), (2**20, 2**20, "MiB"), (2**10, 2**10, "KiB"))
"""From how many bytes on a unit is used. TiB late: memory is bought, and set in a recipe, in GiB."""

_TIME_UNITS = (
    (172_800.0, 86_400.0, "days"),
    (7200.0, 3600.0, "h"),
    (300.0, 60.0, "min"),
    (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"),
    (0.0, 1e-6, "us"),
)
"""From how many seconds on a unit is used: a step of two minutes is still compared with others in seconds."""


def shown_bytes(num_bytes: float) -> str:
    """A size in four digits at most: 812 B, 64.0 KiB, 22.41 GiB, 1,402 GiB; `unknown` where it is not finite."""
    if not math.isfinite(num_bytes):
        return "unknown"
    for least, unit_bytes, unit in _BYTE_UNITS:
        if num_bytes >= least:
            value = num_bytes / unit_bytes
            decimals = 0 if value >= 999.95 else 1 if value >= 99.995 else 2
            return f"{value:,.{decimals}f} {unit}"
    return f"{num_bytes:.0f} B"


def shown_duration(seconds: float) -> str:
    """A time in three digits: 42.0 us, 1.23 ms, 167 s, 6.12 min, 3.40 h, 2.13 days; `unknown` where not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    rounded = float(f"{seconds:.3g}")
    if rounded == 0:
        return "0 s"
    _, unit_s, unit = next((each for each in _TIME_UNITS if rounded >= each[0]), _TIME_UNITS[-1])
    value = seconds / unit_s
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f} {unit}"


def shown_count(value: float) -> str:
    """A count in three digits: 950, 12.3k, 4.56M, 7.62B."""
    rounded = float(f"{value:.3g}")
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if rounded >= limit:
            return f"{rounded / limit:g}{suffix}"
    return f"{rounded:g}"
