"""The actors of a run: started under names that the dashboard shows, with the environment each of them needs.

Ray places no work here: every actor lives for the whole run and asks for no CPU of Ray's count, since the operating
system schedules their threads; only Compute asks for a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from pipeline.actor_processes import ActorProcesses
from pipeline.compute import ComputeActor, ComputeSettings
from pipeline.families import ModelSpec
from pipeline.messages import Lane, LaneSpan
from pipeline.optimizer_pool import OptimizerActor, OptimizerSettings
from tiers.host_memory import require_host_memory
from tiers.layout import ArenaMap, TierPlan
from tiers.parameter_tier import ParameterTierActor
from tiers.prefetcher import PrefetcherActor
from tiers.store_metadata import Compression

logger = logging.getLogger(__name__)

Handle = Any
"""An actor handle: Ray's typed handles do not carry `.options(name=...)` of a method."""

START_TIMEOUT_S = 600.0
"""Populating and registering 100 GiB takes 35 s on the measured machine; a process start under load takes some more."""

CLOSE_TIMEOUT_S = 30.0
"""For removing NVMe working files."""

KILL_GRACE_S = 10.0
"""For processes to end as Ray asks them to."""

END_TIMEOUT_S = 60.0
"""For the kernel to free what a killed actor held: 100 GiB that are registered with a GPU take some seconds."""


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
    ) -> Crew:
        """Start all actors and wait until the arena is populated and every actor has it mapped.

        Raises:
            HostMemoryError: The arena does not fit; nothing was allocated.
            RayTaskError: An actor could not start; its cause says why.
        """
        num_bytes = ArenaMap.of(plan).total_bytes
        # Asked here and not left to the actor: Ray reports a constructor's failure as text only.
        require_host_memory(num_bytes, settings.limit_bytes)
        progress(f"allocating {num_bytes / 2**30:.2f} GiB of host memory")
        tier = _actor(ParameterTierActor, "parameter-tier", namespace, threads=1).remote(
            plan, limit_bytes=settings.limit_bytes
        )
        started: list[Handle] = [tier]
        try:
            handle = ray.get(tier.handle.remote(), timeout=START_TIMEOUT_S)
            prefetcher = _actor(PrefetcherActor, "prefetcher", namespace, threads=1).remote(
                handle, nvme_dir=settings.nvme_dir, threads=settings.io_threads, compression=settings.compression
            )
            started.append(prefetcher)
            optimizers = [
                _actor(OptimizerActor, optimizer_name(part), namespace, threads=1).remote(
                    handle, optimizer, part, settings.optimizer_actors, settings.threads_per_optimizer
                )
                for part in range(settings.optimizer_actors)
            ]
            started += optimizers
            worker = _actor(
                ComputeActor, "compute", namespace, threads=compute.threads, gpu=compute.device == "cuda"
            ).remote(spec, handle, compute)
            started.append(worker)
            progress("starting the prefetcher, optimizers and compute")
            names = [
                "parameter-tier",
                "prefetcher",
                *(f"optimizer-{part}" for part in range(len(optimizers))),
                "compute",
            ]
            pids = ray.get([actor.__ray_call__.remote(_pid) for actor in started], timeout=START_TIMEOUT_S)
            processes = ActorProcesses(dict(zip(names, pids, strict=True)))
        except BaseException:
            _end(started)
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
            # Whatever it is, the actors must not outlive the run.
            logger.warning("the prefetcher was not closed; its NVMe working files are removed at the next start")
        _end(list(self.actors().values()))
        if remaining := self.processes.wait_until_ended(KILL_GRACE_S, END_TIMEOUT_S):
            logger.warning("%s did not end within %.0f s of being killed", ", ".join(remaining), END_TIMEOUT_S)
        self.processes.close()


def optimizer_name(part: int) -> str:
    """Of an optimizer actor in the dashboard and in messages."""
    return f"optimizer-{part}"


def _actor(kind: Any, name: str, namespace: str, *, threads: int, gpu: bool = False) -> Any:
    """Options of an actor that is found by `name` in `ray list actors`."""
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not gpu:
        # Ray hides no GPU from an actor that asks for none, and only Compute may touch CUDA.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Activations and lent state take turns in the same memory: blocks of any size must come out of what others
        # left, and the allocator's usual segments never merge.
        environment["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return kind.options(
        name=name,
        namespace=namespace,
        num_cpus=0,
        num_gpus=1 if gpu else 0,
        max_restarts=0,
        runtime_env={"env_vars": environment},
    )


def _pid(actor: object) -> int:
    return os.getpid()


def _end(actors: list[Handle]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


def default_optimizer_actors(cores: int | None = None) -> tuple[int, int]:
    """Optimizer actors and threads of each, for a machine of `cores`.

    Two cores are left to the driver and Compute. Four actors of three threads reached 4.6 Gparam/s on 16 cores while
    the GPU worked; fewer calls a step than with one actor a core.
    """
    free = max(1, (cores or os.cpu_count() or 1) - 2)
    actors = min(4, free)
    return actors, max(1, free // actors)
