"""A seeded permutation that gives any of its elements at once, without the others. Pure.

A Feistel network over the smallest even number of bits that holds the range; results outside the range are
permuted again until they fall inside (cycle walking). Unlike a library's shuffle it is the same in every version,
so a run may be resumed anywhere, and a position in epoch 3 costs the same as the first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tasks.data.rows import Int64Array

Uint64Array = npt.NDArray[np.uint64]

ROUNDS = 6
"""Four make a pseudo-random permutation (Luby and Rackoff 1988) for large halves; two more for tiny ranges."""


def permuted(indices: Int64Array, size: int, *, seed: int, stream: int) -> Int64Array:
    """Map indices of [0, size) to their places in a permutation of [0, size).

    Args:
        indices: int64, each in [0, size).
        size: length of the permutation.
        seed: of the run.
        stream: which of the seed's permutations, e.g. the epoch.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = mix(np.arange(ROUNDS, dtype=np.uint64) + mix(np.uint64(seed % (1 << 64)) + mix(np.uint64(stream))))
    result = np.array(indices, dtype=np.uint64)
    outside = np.ones(len(result), dtype=np.bool_)
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def mix(values: Uint64Array | np.uint64) -> Uint64Array:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):  # wrapping is meant
        z = np.asarray(values, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _feistel(values: Uint64Array, half: np.uint64, keys: Uint64Array) -> Uint64Array:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right
