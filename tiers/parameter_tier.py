"""The actor that owns host memory. One a run; the others attach to its arena and do the work."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import ray
from ray.actor import ActorClass

from tiers.arena import Arena, ArenaHandle
from tiers.arena_map import ArenaMap, TierPlan
from tiers.quantities import shown_bytes, shown_duration

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierHandle:
    """What another actor of this machine needs to work in the arena."""

    arena: ArenaHandle
    plan: TierPlan

    def attach(self) -> tuple[Arena, ArenaMap]:
        """Map the arena in this process; the caller closes it.

        Raises:
            TierError: The owner is gone or on another machine.
        """
        return Arena.attach(self.arena), ArenaMap.of(self.plan)


class ParameterTier:
    """Owner of the arena, from construction to `close` or the end of its process."""

    def __init__(self, plan: TierPlan, *, limit_bytes: int | None = None, threads: int | None = None) -> None:
        """Allocate and populate the arena.

        Args:
            plan: The placement; every process computes the same map from it.
            limit_bytes: The recipe's `[memory] ram_gib` in bytes.
            threads: Threads that populate; None for every core of this process.

        Raises:
            HostMemoryError: The arena does not fit. Ask `require_host_memory` before starting the actor to get it as
                an exception of its own: Ray reports a constructor's failure as text.
        """
        num_bytes = ArenaMap.of(plan).total_bytes
        start_s = time.monotonic()
        self._arena = Arena.create(num_bytes, limit_bytes=limit_bytes, threads=threads, progress=_log_progress)
        self._handle = TierHandle(self._arena.handle(), plan)
        logger.info("arena of %s populated in %s", shown_bytes(num_bytes), shown_duration(time.monotonic() - start_s))

    @ray.method
    def handle(self) -> TierHandle:
        """Return what other actors attach with; valid while this actor lives."""
        return self._handle

    @ray.method
    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        self._arena.close()


def _log_progress(done_bytes: int, total_bytes: int) -> None:
    logger.debug("arena: %s of %s resident", shown_bytes(done_bytes), shown_bytes(total_bytes))


ParameterTierActor: ActorClass[ParameterTier] = ray.remote(ParameterTier)
