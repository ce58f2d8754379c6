"""The actors of a measurement, filled as a run's are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import ray

from pipeline.crew import Crew
from tasks.filling import fill
from tasks.preparation import Preparation

_NUMBERS = count()


@contextmanager
def bench_crew(preparation: Preparation, say: Callable[[str], None]) -> Iterator[Crew]:
    """All actors, every layer with its first values; gone at the end. Ray must be connected."""
    started_s = time.monotonic()
    namespace = f"megatrain-bench-{ray.get_runtime_context().get_job_id()}-{next(_NUMBERS)}"
    placement = preparation.placement
    settings = preparation.compute, preparation.optimizer, preparation.crew
    with Crew.start(preparation.spec, placement.tier, *settings, namespace, say) as crew:
        fill(crew, placement.tier.model, preparation.recipe, None, say)
        say(f"ready after {time.monotonic() - started_s:.1f} s; the first step compiles on a GPU")
        yield crew
