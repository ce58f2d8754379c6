from __future__ import annotations

import math

import pytest

from tiers.quantities import shown_bytes, shown_count, shown_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (999.4, "999"), (999.6, "1k"), (12_345, "12.3k"), (999_999, "1M"), (4.56e9, "4.56B"), (2e12, "2T")],
)
def test_counts(value: float, text: str) -> None:
    assert shown_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-5, "42.0 us"),
        (0.001234, "1.23 ms"),
        (0.9996, "1.00 s"),
        (167.4, "167 s"),
        (299.9, "5.00 min"),
        (3599.6, "60.0 min"),
        (18_420, "5.12 h"),
        (183_600, "2.12 days"),
        (1e9, "11,574 days"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert shown_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1020 * 2**20, "1,020 MiB"),
        (2**31, "2.00 GiB"),
        (99.996 * 2**30, "100.0 GiB"),
        (1402.3 * 2**30, "1,402 GiB"),
        (20 * 2**40, "20.00 TiB"),
        (math.nan, "unknown"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert shown_bytes(num_bytes) == text


def test_no_amount_above_nothing_is_shown_as_zero() -> None:
    """A small model's plan was a column of zeros."""
    for exponent in range(-6, 16):
        for show in (shown_duration, shown_count):
            assert float(show(1.7 * 10.0**exponent).split()[0].rstrip("kMBT").replace(",", "")) > 0
        assert shown_bytes(max(1, 10**exponent)).split()[0].strip("0.,")
