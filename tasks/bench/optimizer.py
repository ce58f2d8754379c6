"""Rate of the optimizer pool: real Optimizer parts in processes of their own on one arena, for several mixtures."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from pipeline.messages import StepControl
from pipeline.updates.optimizer_pool import Optimizer, OptimizerSettings
from tasks.bench.sample import sample_layers
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.layout import Buffer, ElementType, ModelLayout, Precision
from tiers.parameter_tier import ParameterTier, TierHandle
from tiers.processors import usable_cores

SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
BYTES_PER_PARAMETER = 14
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class PoolRate:
    """What one mixture reaches."""

    actors: int
    threads: int
    """Of each."""
    gparams_per_s: float
    """All together, 1e9 parameters a second."""
    gbps: float
    """Reads plus writes of host memory: 26 bytes a parameter in bf16."""


@dataclass(frozen=True)
class OptimizerReport:
    """Rates of all mixtures."""

    cores: int
    parameters: int
    """Updated in a round."""
    rates: tuple[PoolRate, ...]


def mixtures(cores: int) -> list[tuple[int, int]]:
    """(actors, threads of each) that are worth a look: one core is left to what feeds them."""
    most = max(1, cores - 1)
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    found = {(count, 1) for count in (*counts, most)} | {(count, most // count) for count in counts}
    return sorted(found, key=lambda pair: (pair[0] * pair[1], pair[0]))


def measure_optimizer(
    model: ModelLayout, pairs: Sequence[tuple[int, int]], *, num_bytes: int, seconds: float, say: Callable[[str], None]
) -> OptimizerReport:
    """Time updates of decoder layers that lie in RAM.

    Args:
        model: Whose decoder layers are updated.
        pairs: Actors and threads of each.
        num_bytes: Of the arena, about: whole layers, at least one.
        seconds: To measure each mixture for.
        say: Told how it goes.

    Raises:
        TierError: The machine has not the memory.
    """
    plan = _plan(model, num_bytes, say)
    tier: Any = ParameterTier(plan)
    handle = tier.handle()
    arena, arena_map = handle.attach()
    try:
        _fill(arena, arena_map)
        rates = []
        for actors, threads in pairs:
            rate = _pool_rate(handle, actors, threads, seconds)
            moved = (
                2 * sum(e.element.bytes for e in arena_map.states[0].values()) + arena_map.gradients[0].element.bytes
            )
            rates.append(PoolRate(actors, threads, rate / 1e9, rate * moved / 1e9))
            say(f"{actors} actors x {threads} threads: {rate / 1e9:.2f} Gparam/s")
    finally:
        arena.close()
        tier.close()
    return OptimizerReport(usable_cores(), sum(layer.numel for layer in plan.model.layers), tuple(rates))


def _plan(model: ModelLayout, num_bytes: int, say: Callable[[str], None]) -> TierPlan:
    layers = sample_layers(model, num_bytes, BYTES_PER_PARAMETER, say)
    homes = tuple(LayerHome(gradient_slot=index) for index in range(len(layers)))
    gradient = ElementType.FLOAT32 if model.precision is Precision.FP32 else ElementType.BFLOAT16
    return TierPlan(ModelLayout(layers, model.precision, model.tied), homes, gradient)


def _fill(arena: Arena, arena_map: ArenaMap) -> None:
    """Values near one: denormals would be updated a hundred times slower."""
    bits = np.random.default_rng(0).integers(0x3F00, 0x3F80, 1 << 20, dtype=np.uint16)
    for layer, state in enumerate(arena_map.states):
        for buffer, extent in (*state.items(), (Buffer.GRADIENT, arena_map.gradients[layer])):
            memory = arena.view(extent)
            if buffer is Buffer.WEIGHT_LOW:
                memory[:] = 0
            elif memory.dtype == np.uint16:
                memory[:] = np.resize(bits, memory.size)
            else:
                memory[:] = 0.5


def _pool_rate(handle: TierHandle, actors: int, threads: int, seconds: float) -> float:
    """Parameters a second of all actors together, from the moment when all are ready."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(actors), context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(handle, part, actors, threads, seconds, barrier, answers))
        for part in range(actors)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"an optimizer process ended with {process.exitcode}; its message is above")
    finally:
        for process in processes:
            process.terminate()
    rates: list[float] = [answers.get() for _ in processes]
    return sum(rates)


def _work(
    handle: TierHandle, part: int, parts: int, threads: int, seconds: float, barrier: Barrier, answers: Any
) -> None:
    control = StepControl(applied=True, applied_steps=10, lr=1e-5, clip_coefficient=1.0)
    layers = [layer.index for layer in handle.plan.model.layers]
    # Called without Ray, whose typing of actor methods knows `.remote()` only.
    optimizer: Any = Optimizer(handle, SETTINGS, part, parts, threads)
    with optimizer:
        optimizer.update(1, layers[0], control)
        barrier.wait(READY_TIMEOUT_S)
        done, start_s = 0, time.monotonic()
        while time.monotonic() - start_s < seconds:
            for layer in layers:
                optimizer.update(1, layer, control)
                done += handle.plan.model.layers[layer].numel
        answers.put(done / parts / (time.monotonic() - start_s))
