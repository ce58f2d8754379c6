"""Turns a Hugging Face model directory into a store: the files that describe it, and a checkpoint of step 0.

    STORE/config.json, tokenizer and generation files     as in the source
    STORE/checkpoints/step-000000                          as any checkpoint: weights, zero moments, checksums

A recipe names the store as `[model] source`; it needs nothing of the directory it came from.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.families import load_model_spec, model_layout
from pipeline.recipe import (
    DataSection,
    ModelSection,
    PrecisionSection,
    Recipe,
    RunSection,
    TrainSection,
    recipe_toml,
)
from tasks.checkpointing import LIBRARIES
from tasks.hf_companions import GENERATION_FILES, TOKENIZER_FILES, companion_files
from tasks.hf_directory import CONFIG
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.checkpoint import CheckpointWriter, begin, required_bytes
from tiers.direct_io import DirectIO
from tiers.durable_files import new_directory, sync_file
from tiers.errors import TierError
from tiers.layout import Buffer, ModelLayout, Precision, buffer_types, stored_buffers
from tiers.manifest import Facts, SavedPosition
from tiers.preflight import check_free_bytes, nearest_existing, preflight
from tiers.quantities import shown_duration
from tiers.safetensors_source import SafetensorsSource
from tiers.shard_store import ShardStore
from tiers.shards import FileRecord

SAY_EVERY_S = 5.0


class ImportRefusedError(TierError, ValueError):
    """An import that cannot be made as asked; nothing was written."""


def import_model(source: Path, store: Path, precision: Precision, threads: int, say: Callable[[str], None]) -> Path:
    """Write the model of `source` to `store`, whole or not at all.

    Host memory holds one layer at a time: 18 bytes (bf16) or 20 bytes (fp32) for each parameter of the largest.

    Args:
        source: Hugging Face directory: config.json and safetensors.
        store: Must not exist, or be an empty directory.
        precision: Of the runs that start from it.
        threads: Disk requests in flight.
        say: Gets a line of progress every few seconds.

    Returns:
        The absolute path of the store.

    Raises:
        ImportRefusedError: `store` is taken.
        UnsupportedModelError, ShardError, ImportedTensorError: The source is not a model that can be trained.
        TierError: Disk or memory are too small.
    """
    source, store = source.absolute(), store.absolute()
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise ImportRefusedError(f"{store} exists and is not an empty directory; name another, nothing is overwritten")
    model = model_layout(load_model_spec(source, precision))
    checked = SafetensorsSource(source, model)
    _check_room(store, model)
    with new_directory(store) as partial:
        for path in companion_files(source, (CONFIG, *TOKENIZER_FILES, *GENERATION_FILES)):
            shutil.copyfile(path, partial / path.name)
            sync_file(partial / path.name)
        writer = begin(partial, 0, model)
        writer.publish(_write_layers(checked, writer, model, threads, say), _facts(store, model))
    return store


def one_layer_plan(model: ModelLayout) -> TierPlan:
    """A placement whose arena has room for one layer: they all share the same slots."""
    home = LayerHome(weight_slot=0, state_slot=0, gradient_slot=0)
    gradient_type = buffer_types(model.precision)[Buffer.GRADIENT]
    return TierPlan(model, (home,) * len(model.layers), gradient_type)


def _check_room(store: Path, model: ModelLayout) -> None:
    """Refuse before a directory is made."""
    check_free_bytes(nearest_existing(store.parent), required_bytes(model))


def _write_layers(
    source: SafetensorsSource, writer: CheckpointWriter, model: ModelLayout, threads: int, say: Callable[[str], None]
) -> list[FileRecord]:
    plan = one_layer_plan(model)
    arena_map, buffers = ArenaMap.of(plan), stored_buffers(model.precision)
    records: list[FileRecord] = []
    progress = _Progress(model, say)
    with Arena.create(arena_map.total_bytes, threads=threads) as arena, DirectIO(threads) as io:
        target = ShardStore(writer.directory, model, io, preflight(writer.directory))
        for layer in model.layers:
            source.read_layer_into(arena, arena_map, layer)
            arrays = {buffer: arena.view(arena_map.states[layer.index][buffer]) for buffer in buffers}
            records += target.create_layer(layer, buffers)
            records += target.write(layer, arrays, sync=True)
            progress.wrote(layer.numel)
    return records


class _Progress:
    """Says how much is done and how long the rest will take."""

    def __init__(self, model: ModelLayout, say: Callable[[str], None]) -> None:
        self._say = say
        self._total = sum(layer.numel for layer in model.layers)
        self._done = 0
        self._started_s = self._said_s = time.monotonic()

    def wrote(self, numel: int) -> None:
        """Count a layer."""
        self._done += numel
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S and self._done < self._total:
            self._said_s = now_s
            share = self._done / self._total
            self._say(f"imported {share:.0%}, {shown_duration((now_s - self._started_s) * (1 / share - 1))} left")


def _facts(store: Path, model: ModelLayout) -> Facts:
    """Of a model that no run has trained: the recipe says where it is, its other keys are the least a recipe needs."""
    recipe = Recipe(
        run=RunSection(name="import", dir=store),
        model=ModelSection(source=store),
        data=DataSection(path=(store,)),
        train=TrainSection(steps=1, sequence_length=2, sequences_per_step=1),
        precision=PrecisionSection(mode=model.precision.value),
    )
    return Facts(
        step=0,
        applied_steps=0,
        skipped_steps=0,
        data_position=SavedPosition(epoch=0, sequence=0),
        seed=recipe.run.seed,
        recipe=recipe_toml(recipe),
        libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
        precision=model.precision,
        num_parameters=model.num_parameters,
    )
