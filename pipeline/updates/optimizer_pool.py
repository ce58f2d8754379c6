"""Optimizer actors: each updates its part of a layer in place in the arena, with threads of its own.

The coordinator sends every update to all of them; parts do not overlap and need no word between each other. Nothing is
owned here but a mapping of the arena.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import TracebackType

import numpy as np
import ray
from ray.actor import ActorClass

from pipeline.messages import Lane, LaneSpan, StepControl
from pipeline.updates.adamw import OptimizerSettings, Scalars, update
from tiers.layout import Buffer, LayerLayout, round_up
from tiers.master import LayerState
from tiers.parameter_tier import TierHandle

__all__ = ["DecayRun", "Optimizer", "OptimizerActor", "OptimizerSettings", "decay_runs", "part_of"]

PART_ALIGNMENT = 4096
"""Elements: parts of two actors never share a page of any buffer (2 bytes an element or more)."""

BLOCK_ELEMENTS = 1 << 20
"""Most that a thread takes at a time. Handing out a block holds the GIL: two threads on two cores reach 2.35 Gparam/s
with blocks of 1 Mi elements, 1.87 with 256 Ki and 1.44 with 64 Ki (bf16 split master; one thread alone 2.15)."""

BLOCKS_PER_THREAD = 4
"""At least, in layers large enough: what keeps threads level where the last block would be one thread's alone."""


@dataclass(frozen=True, slots=True)
class DecayRun:
    """Consecutive elements of a layer that are all decayed, or all not, padding included."""

    start: int
    stop: int
    decay: bool
    names: tuple[str, ...]
    """Tensors of the run."""


def decay_runs(layer: LayerLayout) -> tuple[DecayRun, ...]:
    """Split a layer where the decay of its tensors changes. Padding goes with the tensor before it: it stays zero."""
    runs: list[DecayRun] = []
    for tensor in layer.tensors:
        if runs and runs[-1].decay == tensor.decay:
            runs[-1] = DecayRun(runs[-1].start, layer.numel, tensor.decay, (*runs[-1].names, tensor.name))
            continue
        if runs:
            runs[-1] = DecayRun(runs[-1].start, tensor.offset, runs[-1].decay, runs[-1].names)
        runs.append(DecayRun(tensor.offset, layer.numel, tensor.decay, (tensor.name,)))
    return tuple(runs)


def part_of(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Elements [start, stop) of `numel` that part `part` of `parts` updates; empty where there are too few."""
    units = -(-numel // PART_ALIGNMENT)
    start, stop = (units * number // parts * PART_ALIGNMENT for number in (part, part + 1))
    return min(start, numel), min(stop, numel)


class Optimizer:
    """One part of every layer's update. A context manager: leaving it ends the threads and unmaps the arena."""

    def __init__(self, tier: TierHandle, settings: OptimizerSettings, part: int, parts: int, threads: int) -> None:
        """Attach to the arena and compile the kernel.

        Args:
            tier: Of the ParameterTier, which owns the bytes and outlives this.
            settings: Equal in all parts.
            part: Number of this part, from 0.
            parts: How many there are.
            threads: Threads that share this part.
        """
        assert 0 <= part < parts and threads >= 1
        self._settings = settings
        self._part, self._parts = part, parts
        self._arena, self._map = tier.attach()
        self._num_threads = threads
        # One thread needs no pool: the call's own does the work.
        self._threads = ThreadPoolExecutor(threads, "optimizer") if threads > 1 else None
        self._runs = cache(lambda index: decay_runs(tier.plan.model.layers[index]))
        self._warm_up()

    @ray.method
    def update(self, step: int, layer: int, control: StepControl, *after: object) -> LaneSpan:
        """Apply a step to this part of a layer, or leave every bit where the step is not applied.

        Args:
            step: Number of the step; what is computed depends on `control` alone.
            layer: Whose gradient slot is full and whose state is in RAM; both stay this call's until it returns.
            control: Of the step.
            after: What had to happen before; ignored.
        """
        start_s = time.monotonic()
        num_bytes = self._apply(layer, control) if control.applied else 0
        return LaneSpan(
            f"update[{layer}]", Lane.UPDATE, f"optimizer-{self._part}", start_s, time.monotonic(), num_bytes
        )

    @ray.method
    def close(self) -> None:
        """End the threads and unmap the arena."""
        self._release()

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self._arena.close()

    def _apply(self, layer: int, control: StepControl) -> int:
        """Update this part; return the bytes read and written."""
        state = LayerState.of(self._arena, self._map, self._map.plan.model.layers[layer])
        gradient = self._arena.view(self._map.gradients[layer])
        weight, low, (exp_avg, exp_avg_sq) = state.weight, state.weight_low, state.moments
        scalars = {
            decay: Scalars.of(
                self._settings,
                lr=control.lr,
                applied_steps=control.applied_steps,
                clip_coefficient=control.clip_coefficient,
                decay=decay,
            )
            for decay in (False, True)
        }

        def update_block(block: tuple[int, int, bool]) -> None:
            start, stop, decay = block
            update(
                weight[start:stop],
                None if low is None else low[start:stop],
                exp_avg[start:stop],
                exp_avg_sq[start:stop],
                gradient[start:stop],
                scalars[decay],
            )

        start, stop = part_of(gradient.size, self._part, self._parts)
        blocks = self._blocks(layer, start, stop)
        if self._threads is None:
            for block in blocks:
                update_block(block)
        else:
            # list() so that an exception of a thread is raised here.
            list(self._threads.map(update_block, blocks))
        element_bytes = 2 * sum(extent.element.bytes for extent in self._map.states[layer].values()) + gradient.itemsize
        return (stop - start) * element_bytes

    def _blocks(self, layer: int, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Cut [start, stop) where decay changes and into blocks for the threads."""
        wanted = max(PART_ALIGNMENT, (stop - start) // (self._num_threads * BLOCKS_PER_THREAD))
        size = min(BLOCK_ELEMENTS, round_up(wanted, PART_ALIGNMENT))
        for run in self._runs(layer):
            run_start, run_stop = max(run.start, start), min(run.stop, stop)
            for block_start in range(run_start, run_stop, size):
                yield block_start, min(block_start + size, run_stop), run.decay

    def _warm_up(self) -> None:
        """Compile or load the kernel for this run's types now, not within the first step."""
        types = self._map.states[0] | {Buffer.GRADIENT: self._map.gradients[0]}
        arrays = {buffer: np.zeros(64, extent.element.storage) for buffer, extent in types.items()}
        update(
            arrays[Buffer.WEIGHT],
            arrays.get(Buffer.WEIGHT_LOW),
            arrays[Buffer.EXP_AVG],
            arrays[Buffer.EXP_AVG_SQ],
            arrays[Buffer.GRADIENT],
            Scalars.of(self._settings, lr=0.0, applied_steps=1, clip_coefficient=1.0, decay=False),
        )


OptimizerActor: ActorClass[Optimizer] = ray.remote(Optimizer)
