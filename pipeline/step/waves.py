"""How a step's micro-batches are shared out among its waves, each of which passes all layers before the next begins."""

from __future__ import annotations


def micro_batches_of(wave: int, waves: int, count: int) -> range:
    """Micro-batches of a wave, of `count` in all: consecutive, and no wave has two more than another."""
    return range(count * wave // waves, count * (wave + 1) // waves)


def largest_wave(waves: int, count: int) -> int:
    """Micro-batches of the wave that has most."""
    return -(-count // waves)
