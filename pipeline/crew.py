"""The actors of a run: started under names that the dashboard shows, with the environment each of them needs.

Ray places no work here: every actor lives for the whole run and asks for no CPU of Ray's count, since the operating
system schedules their threads; only Compute asks for a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import ray
from ray.exceptions import RayActorError, RayError

from pipeline.actor_handles import Handle, answers, died, end_actors, options_of, process_number
from pipeline.actor_processes import ActorProcesses
from pipeline.compute import ComputeActor, ComputeSettings
from pipeline.errors import ActorLostError
from pipeline.families import ModelSpec
from pipeline.messages import Lane, LaneSpan
from pipeline.updates.optimizer_pool import OptimizerActor, OptimizerSettings
from tiers.arena_map import ArenaMap, TierPlan
from tiers.arena_users import ArenaIdentity
from tiers.host_memory import require_host_memory
from tiers.parameter_tier import ParameterTierActor
from tiers.prefetcher import PrefetcherActor
from tiers.quantities import shown_bytes
from tiers.store_metadata import Compression

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Populating and registering 100 GiB takes 35 s on the measured machine; a process start under load takes some more."""

CLOSE_TIMEOUT_S = 30.0
"""For removing NVMe working files."""


@dataclass(frozen=True, slots=True)
class CrewSettings:
    """How many actors and threads a run has."""

    optimizer_actors: int
    threads_per_optimizer: int
    io_threads: int
    limit_bytes: int | None
    """Host memory the arena may take at most; None means what the machine has."""
    nvme_dir: Path | None
    compression: Compression = Compression.NONE
    """Of the checkpoints."""
    staging_bytes: int = 0
    """The most memory for copies of what a checkpoint has not written yet."""


@dataclass
class Crew:
    """Handles of the run's actors. A context manager: leaving it ends them, and with them the arena."""

    tier: Handle
    prefetcher: Handle
    optimizers: list[Handle]
    compute: Handle
    processes: ActorProcesses
    """Of the actors; closed with the crew."""

    @classmethod
    def start(
        cls,
        spec: ModelSpec,
        plan: TierPlan,
        compute: ComputeSettings,
        optimizer: OptimizerSettings,
        settings: CrewSettings,
        namespace: str,
        progress: Callable[[str], None] = logger.info,
        *,
        memory_wait_s: float = 0.0,
    ) -> Crew:
        """Start all actors and wait until the arena is populated and every actor has it mapped.

        If that fails, those that were started have ended when it raises.

        Args:
            spec: Model.
            plan: Placement.
            compute: Of the compute actor.
            optimizer: Of the optimizers.
            settings: How many of each there are.
            namespace: Of the actors' names.
            progress: Shows a line.
            memory_wait_s: How long host memory may take to come free: after a death the kernel may still be at it.

        Raises:
            HostMemoryError: The arena does not fit; nothing was allocated.
            ActorLostError, RayActorError: An actor died, or could not start: then the error says why.
            RayLostError: Ray itself did.
        """
        num_bytes = ArenaMap.of(plan).total_bytes
        # Asked here and not left to the actor: Ray reports a constructor's failure as text only.
        require_host_memory(num_bytes, settings.limit_bytes, wait_s=memory_wait_s)
        progress(f"allocating {shown_bytes(num_bytes)} of host memory")
        tier = options_of(ParameterTierActor, "parameter-tier", namespace, threads=1).remote(
            plan, limit_bytes=settings.limit_bytes
        )
        started: dict[str, Handle] = {"parameter-tier": tier}
        arena: ArenaIdentity | None = None
        try:
            (handle,) = answers([tier.handle.remote()], START_TIMEOUT_S)
            with suppress(OSError):  # the owner is gone already: whoever needs it says so
                arena = ArenaIdentity.of(handle.arena)
            prefetcher = options_of(PrefetcherActor, "prefetcher", namespace, threads=1).remote(
                handle,
                nvme_dir=settings.nvme_dir,
                threads=settings.io_threads,
                compression=settings.compression,
                staging_bytes=settings.staging_bytes,
            )
            started["prefetcher"] = prefetcher
            optimizers = [
                options_of(OptimizerActor, optimizer_name(part), namespace, threads=1).remote(
                    handle, optimizer, part, settings.optimizer_actors, settings.threads_per_optimizer
                )
                for part in range(settings.optimizer_actors)
            ]
            started |= {optimizer_name(part): actor for part, actor in enumerate(optimizers)}
            worker = options_of(
                ComputeActor, "compute", namespace, threads=compute.threads, gpu=compute.device == "cuda"
            ).remote(spec, handle, compute)
            started["compute"] = worker
            progress("starting the prefetcher, optimizers and compute")
            pids = answers([actor.__ray_call__.remote(process_number) for actor in started.values()], START_TIMEOUT_S)
            processes = ActorProcesses(dict(zip(started, pids, strict=True)))
        except BaseException as error:
            # Who is still starting has told no process number; whoever has the arena is known by it.
            users = ActorProcesses.with_arena(arena) if arena is not None else ActorProcesses({})
            # Without the tier the others cannot be constructed: their errors are not the cause.
            without_tier = isinstance(error, RayActorError) and died(tier)
            end_actors(list(started.values()), users)
            if without_tier:
                raise ActorLostError("the actor parameter-tier died while the actors were starting") from error
            raise
        return cls(tier, prefetcher, optimizers, worker, processes)

    def actors(self) -> dict[str, Handle]:
        """Every actor under the name that the dashboard shows."""
        named = {"parameter-tier": self.tier, "prefetcher": self.prefetcher, "compute": self.compute}
        return named | {optimizer_name(part): actor for part, actor in enumerate(self.optimizers)}

    def take_spans(self) -> list[LaneSpan]:
        """What device and disk have done since the last call; updates report theirs as results."""
        compute, io = ray.get([self.compute.take_spans.remote(), self.prefetcher.take_spans.remote()])
        return [*compute, *(LaneSpan(s.name, Lane(s.lane), "prefetcher", s.start_s, s.end_s, s.num_bytes) for s in io)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            ray.get(self.prefetcher.close.remote(), timeout=CLOSE_TIMEOUT_S)
        except RayError:
            logger.warning("the prefetcher was not closed; its NVMe working files are removed at the next start")
        finally:
            # Whatever it is, a second signal too: the actors must not outlive the run.
            end_actors(list(self.actors().values()), self.processes)


def optimizer_name(part: int) -> str:
    """Of an optimizer actor in the dashboard and in messages."""
    return f"optimizer-{part}"


def default_optimizer_actors(cores: int) -> tuple[int, int]:
    """Optimizer actors and threads of each, where `cores` may be used.

    Two cores are left to the driver and Compute. Four actors of three threads reached 4.6 Gparam/s on 16 cores while
    the GPU worked; fewer calls a step than with one actor a core.
    """
    free = max(1, cores - 2)
    actors = min(4, free)
    return actors, max(1, free // actors)
