"""Random initialisation of a layer, straight into the arena.

Every block of a tensor has a random stream of its own, keyed by (seed, tensor name, block): the values do not depend
on threads, actors, placement or the order of layers, nor on what other tensors the model has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from tiers.arena import Arena
from tiers.arena_map import ArenaMap
from tiers.layout import InitKind, LayerLayout, TensorSpec
from tiers.master import Float32Array, LayerState
from tiers.processors import usable_cores

BLOCK_ELEMENTS = 2**20
"""Elements a stream draws. Part of what a seed means: changing it changes every initialised model."""

MOST_THREADS = 16
"""Each holds 8 MiB while it draws: 128 MiB, which the plan's account of the tier's actors has room for."""


def drawing_threads() -> int:
    """Threads that draw on this machine: one a core, as far as memory is planned for them."""
    return min(MOST_THREADS, usable_cores())


def initialise_layer(arena: Arena, arena_map: ArenaMap, layer: LayerLayout, seed: int, threads: int = 1) -> None:
    """Write the layer's initial master, zero moments and zero padding to where the layer is updated.

    Args:
        arena: The arena, attached or owned.
        arena_map: Where things lie in it. A copy of the weights in a streaming slot is not touched.
        layer: What to initialise.
        seed: The run's seed, 0 to 2^64 - 1.
        threads: Threads that draw; the values are the same for any number.
    """
    state = LayerState.of(arena, arena_map, layer)
    work: list[Callable[[], None]] = [state.clear_padding, *(partial(moment.fill, 0) for moment in state.moments)]
    work += [block for tensor in layer.tensors for block in _blocks(state, tensor, seed)]
    if threads == 1:
        for item in work:
            item()
        return
    # NumPy draws and converts without the GIL.
    with ThreadPoolExecutor(threads, thread_name_prefix="initialise") as executor:
        for future in [executor.submit(item) for item in work]:
            future.result()


def draw_block(tensor: TensorSpec, seed: int, block: int) -> Float32Array:
    """Return the initial values of one block of a tensor: float32, BLOCK_ELEMENTS of them or what is left."""
    numel = min(BLOCK_ELEMENTS, tensor.numel - block * BLOCK_ELEMENTS)
    if tensor.init is not InitKind.NORMAL:
        return np.full(numel, 1 if tensor.init is InitKind.ONES else 0, np.float32)
    name_key = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=8).digest(), "little")
    key = np.array([seed, name_key], np.uint64)
    # The block counts in the highest of the counter's four words, so that streams are 2^192 draws apart.
    stream = np.random.Philox(key=key, counter=np.array([0, 0, 0, block], np.uint64))
    values: Float32Array = np.random.Generator(stream).standard_normal(numel, np.float32)
    values *= np.float32(tensor.std)
    return values


def _blocks(state: LayerState, tensor: TensorSpec, seed: int) -> Iterator[Callable[[], None]]:
    def write(block: int) -> None:
        state.write_float32(tensor.offset + block * BLOCK_ELEMENTS, draw_block(tensor, seed, block))

    for block in range(-(-tensor.numel // BLOCK_ELEMENTS)):
        yield partial(write, block)
