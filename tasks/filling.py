"""Gives every layer its first values, layers in parallel: random, from a Hugging Face directory or a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from pipeline.crew import Crew
from pipeline.recipe import Recipe
from tasks.model_source import imported_checkpoint
from tiers.checkpoint import complete_before
from tiers.errors import CheckpointError, TierError
from tiers.layout import ModelLayout
from tiers.quantities import shown_duration

SAY_EVERY_S = 5.0


def fill(crew: Crew, model: ModelLayout, recipe: Recipe, checkpoint: Path | None, say: Callable[[str], None]) -> None:
    """Fill the tier and tell how far it is.

    Args:
        crew: The actors; the Prefetcher does the work.
        model: Its layers.
        recipe: Says where a run without a checkpoint starts from.
        checkpoint: To restore; None at the start of a run.
        say: Shown a line every few seconds.

    Raises:
        CheckpointError: The checkpoint is damaged; the file and an older checkpoint are named.
        RayTaskError: A layer could not be read; its cause says which file and why.
    """
    prefetcher, source = crew.prefetcher, recipe.model.source
    imported = imported_checkpoint(source) if source is not None else None
    if checkpoint is not None:
        what = f"restoring {checkpoint.name}"
        pending = [prefetcher.restore.remote(layer.index, checkpoint) for layer in model.layers]
    elif imported is not None:
        what = f"reading {source}"
        pending = [prefetcher.restore.remote(layer.index, imported) for layer in model.layers]
    elif source is not None:
        what = f"importing {source}"
        pending = [prefetcher.import_safetensors.remote(layer.index, source) for layer in model.layers]
    else:
        what = "drawing random weights"
        pending = [prefetcher.initialise.remote(layer.index, recipe.run.seed) for layer in model.layers]
    started_s = time.monotonic()
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=SAY_EVERY_S)
        _require(done, checkpoint)
        if pending:
            share = 1.0 - len(pending) / len(model.layers)
            elapsed_s = time.monotonic() - started_s
            left = shown_duration(elapsed_s / share - elapsed_s) if share else "unknown"
            say(f"{what}: {share:.0%}, {left} left")
    say(f"{what}: done in {shown_duration(time.monotonic() - started_s)}")


def _require(done: list[Any], checkpoint: Path | None) -> None:
    """Raise what a layer's call raised; of a checkpoint also say from where else the run could go on."""
    try:
        ray.get(done)
    except RayTaskError as error:
        if checkpoint is None or not isinstance(error.cause, TierError):
            raise
        older = complete_before(checkpoint)
        advice = f'run.resume = "{older}" goes on from the one before it' if older else "there is none before it"
        raise CheckpointError(f"{checkpoint} is not resumed from: {error.cause}. {advice}") from error
