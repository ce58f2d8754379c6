"""What a checkpoint costs the steps that it is written beside: steps with and without one, turn about in one run.

A segment without a checkpoint stands before and after each one with, so that what else happens on the machine meets
both. A checkpoint spans the steps from the end of its own to the end of the one in which it was published, whose
files were synced, named and, as with `checkpoint.keep_last = 1`, the older ones removed.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.placement import Placement
from pipeline.recipe import recipe_toml
from tasks.bench.crew import bench_crew
from tasks.bench.stepper import WARM_UP_STEPS, Stepper
from tasks.preparation import Preparation
from tasks.run_log import held_bytes
from tiers.arena_map import ArenaMap
from tiers.checkpoint import begin
from tiers.manifest import Facts, SavedPosition
from tiers.preflight import nearest_existing
from tiers.quantities import shown_bytes, shown_duration
from tiers.shards import store_bytes
from tiers.store_metadata import Compression

SAMPLE_S = 0.05
"""Between two looks at the memory that is held."""


@dataclass(frozen=True)
class Round:
    """One checkpoint between two segments without."""

    step_s: float
    """Mean of the steps without, before and after."""
    spanned_steps: int
    spanned_step_s: float
    """Mean of those that the checkpoint spans."""
    seconds: float
    """From the end of its step to its last file, and to publish it."""
    publish_s: float
    """Of these, by the driver, beside the steps: sync, name, remove the older one."""
    num_bytes: int
    host_peak_bytes: int
    """Held while it was written, the arena included."""

    @property
    def overhead(self) -> float:
        """Share by which the spanned steps are longer."""
        return self.spanned_step_s / self.step_s - 1


@dataclass(frozen=True)
class CheckpointReport:
    """Medians of the rounds, and the rounds."""

    compression: str
    state_bytes: int
    """What a copy of it would take."""
    staging_bytes: int
    """The most that is copied of it, by the plan."""
    step_s: float
    spanned_step_s: float
    overhead: float
    spanned_steps: float
    lost_s: float
    """What a checkpoint costs the run: by how much the spanned steps together are longer."""
    steps_for_5_percent: int
    """With a checkpoint every so many steps it costs 5 % of the run."""
    seconds: float
    num_bytes: int
    gbps: float
    """Of the files until the last was written, 1e9 bytes a second."""
    host_bytes: int
    """Held at most in the steps before the first: what one leaves to the system still counts as a process's."""
    host_peak_bytes: int
    """Likewise in the steps with."""
    rounds: tuple[Round, ...]


def measure_checkpoints(
    preparation: Preparation,
    compression: Compression,
    *,
    directory: Path | None,
    steps: int,
    rounds: int,
    say: Callable[[str], None],
) -> CheckpointReport:
    """Run with and without checkpoints. Ray must be connected.

    Args:
        preparation: Of the recipe.
        compression: Of the checkpoints.
        directory: On the drive that is written; None for that of the recipe's `run.dir`. Left as it was found.
        steps: Of each segment without a checkpoint.
        rounds: Checkpoints.
        say: Told how it goes.

    Raises:
        CheckpointError: The drive has no room for one checkpoint.
        RayError: An actor failed.
    """
    recipe = preparation.recipe
    where = directory or nearest_existing(recipe.run.dir)
    crew_settings = replace(preparation.crew, compression=compression)
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=where) as folder,
        bench_crew(replace(preparation, crew=crew_settings), say) as crew,
    ):
        coordinator = Coordinator(crew, preparation.placement.schedule, applied_steps=0)
        stepper = Stepper(coordinator, preparation, say)
        arena_bytes = ArenaMap.of(preparation.placement.tier).total_bytes
        with _sampled(crew, arena_bytes) as samples:
            for _ in range(WARM_UP_STEPS + 1 + steps):
                stepper.advance()
            plain = [(WARM_UP_STEPS, stepper.ended)]
            written = []
            for _ in range(rounds):
                written.append(_checkpoint(crew, stepper, preparation, Path(folder), say))
                first = stepper.ended
                for _ in range(steps):
                    stepper.advance()
                plain.append((first, stepper.ended))
            stepper.finish()
            coordinator.drain()
    return _report(compression, preparation.placement, stepper, samples, plain, written)


@dataclass(frozen=True)
class _Written:
    """A checkpoint, in steps and seconds."""

    step: int
    """Whose state it holds."""
    last_step: int
    """In which it was published."""
    seconds: float
    publish_s: float
    num_bytes: int


def _checkpoint(
    crew: Crew, stepper: Stepper, preparation: Preparation, run_dir: Path, say: Callable[[str], None]
) -> _Written:
    """Step on until a checkpoint is published; remove it, for the drive may hold no second one."""
    step, model = len(stepper.submitted) + 1, preparation.placement.tier.model
    crew.take_spans()
    writer = begin(run_dir, step, model)
    refs = stepper.advance(writer.directory).snapshots
    stepper.advance()
    while len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) < len(refs):
        stepper.advance()

    def publish() -> tuple[float, int]:
        """Beside the steps, as a run does; return how long it took, and the bytes."""
        began_s = time.monotonic()
        path = writer.publish([record for layer in ray.get(refs) for record in layer], _facts(preparation, step))
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        return time.monotonic() - began_s, num_bytes

    with ThreadPoolExecutor(1) as publisher:
        published = publisher.submit(publish)
        while not published.done():
            stepper.advance()
    publish_s, num_bytes = published.result()
    written_s = max(span.end_s for span in crew.take_spans() if span.name.startswith("snapshot["))
    seconds = written_s - stepper.ends_s[step - 1] + publish_s
    stepper.advance()
    say(f"checkpoint of step {step}: {shown_bytes(num_bytes)} in {shown_duration(seconds)}, until step {stepper.ended}")
    return _Written(step, stepper.ended, seconds, publish_s, num_bytes)


def _facts(preparation: Preparation, step: int) -> Facts:
    model = preparation.placement.tier.model
    return Facts(
        step=step,
        applied_steps=step,
        skipped_steps=0,
        data_position=SavedPosition(epoch=0, sequence=0),
        seed=preparation.recipe.run.seed,
        recipe=recipe_toml(preparation.recipe),
        libraries={},
        precision=model.precision,
        num_parameters=model.num_parameters,
    )


@contextmanager
def _sampled(crew: Crew, arena_bytes: int) -> Iterator[list[tuple[float, int]]]:
    """Note again and again what the run holds: (time, bytes)."""
    samples: list[tuple[float, int]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            samples.append((time.monotonic(), held_bytes(crew, arena_bytes)))

    thread = threading.Thread(target=look, name="memory")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _report(
    compression: Compression,
    placement: Placement,
    stepper: Stepper,
    samples: list[tuple[float, int]],
    plain: list[tuple[int, int]],
    written: list[_Written],
) -> CheckpointReport:
    def peak(first: int, last: int) -> int:
        """From the end of step `first` to that of step `last`."""
        start_s, end_s = stepper.ends_s[first - 1], stepper.ends_s[last - 1]
        return max((held for time_s, held in samples if start_s <= time_s <= end_s), default=0)

    rounds = []
    for before, each, after in zip(plain, written, plain[1:], strict=False):
        without = [*stepper.lengths_s(before[0] + 1, before[1]), *stepper.lengths_s(after[0] + 1, after[1])]
        spanned = stepper.lengths_s(each.step + 1, each.last_step)
        rounds.append(
            Round(
                step_s=statistics.mean(without),
                spanned_steps=len(spanned),
                spanned_step_s=statistics.mean(spanned),
                seconds=each.seconds,
                publish_s=each.publish_s,
                num_bytes=each.num_bytes,
                host_peak_bytes=peak(each.step, each.last_step),
            )
        )
    seconds, num_bytes = statistics.median(r.seconds for r in rounds), rounds[-1].num_bytes
    lost_s = statistics.median((each.spanned_step_s - each.step_s) * each.spanned_steps for each in rounds)
    step_s = statistics.median(each.step_s for each in rounds)
    return CheckpointReport(
        compression=str(compression),
        state_bytes=store_bytes(placement.tier.model),
        staging_bytes=placement.staging_bytes,
        step_s=step_s,
        lost_s=lost_s,
        steps_for_5_percent=max(1, math.ceil(lost_s / (0.05 * step_s))),
        spanned_step_s=statistics.median(r.spanned_step_s for r in rounds),
        overhead=statistics.median(r.overhead for r in rounds),
        spanned_steps=statistics.median(r.spanned_steps for r in rounds),
        seconds=seconds,
        num_bytes=num_bytes,
        gbps=statistics.median(r.num_bytes / (r.seconds - r.publish_s) / 1e9 for r in rounds),
        host_bytes=peak(*plain[0]),
        host_peak_bytes=max(r.host_peak_bytes for r in rounds),
        rounds=tuple(rounds),
    )
