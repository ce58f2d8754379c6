"""The parts behind a run's actors in this process, called as the coordinator calls actors: the same graph without Ray.

A call is made when it is submitted, and its result stands where a reference would: one operation after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from pipeline.actor_processes import ActorProcesses
from pipeline.compute import Compute
from pipeline.crew import Crew
from pipeline.updates.optimizer_pool import Optimizer
from tasks.preparation import Preparation
from tiers.parameter_tier import ParameterTier
from tiers.prefetcher import Prefetcher


class _Method:
    """A method that is called as an actor's is."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **_: object) -> _Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        """Make the call; what the coordinator put into Ray's store is fetched from there."""
        return self._call(*(ray.get(each) if isinstance(each, ray.ObjectRef) else each for each in arguments))


class _Handle:
    """Stands for an actor's handle."""

    def __init__(self, part: object) -> None:
        self._part = part

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._part, name))


@contextmanager
def inline_crew(preparation: Preparation) -> Iterator[Crew]:
    """All parts with random weights. Ray must be connected, for the coordinator's first control."""
    settings, plan = preparation.crew, preparation.placement.tier
    with ExitStack() as held:

        def kept(part: Any) -> Any:
            held.callback(part.close)
            return part

        # Called without Ray, whose typing of actor methods knows `.remote()` only.
        tier: Any = kept(ParameterTier(plan, limit_bytes=settings.limit_bytes))
        handle = tier.handle()
        prefetcher: Any = kept(Prefetcher(handle, nvme_dir=settings.nvme_dir, threads=settings.io_threads))
        optimizers = [
            kept(
                Optimizer(
                    handle, preparation.optimizer, part, settings.optimizer_actors, settings.threads_per_optimizer
                )
            )
            for part in range(settings.optimizer_actors)
        ]
        compute = kept(Compute(preparation.spec, handle, preparation.compute))
        for layer in plan.model.layers:
            prefetcher.initialise(layer.index, preparation.recipe.run.seed)
        processes = kept(ActorProcesses({}))
        yield Crew(_Handle(tier), _Handle(prefetcher), [*map(_Handle, optimizers)], _Handle(compute), processes)
