"""From a recipe to everything a run needs, with every refusal before anything is allocated or written.

Cheap checks come first, reading the data last: a wrong key costs a second, not an hour of tokenising.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.compute.settings import ComputeSettings
from pipeline.crew import CrewSettings, default_optimizer_actors
from pipeline.families import ModelSpec
from pipeline.machine_memory import MachineMemory
from pipeline.memory.footprint import GIB
from pipeline.messages import IGNORED
from pipeline.placement import Placement, preflight
from pipeline.prediction.hardware import Hardware
from pipeline.recipe import Recipe
from pipeline.recipe_limits import check_threads
from pipeline.recipe_placement import place_recipe, shape_of, spec_of
from pipeline.updates.optimizer_pool import OptimizerSettings
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.data.settings import DataError, DataSettings
from tasks.model_source import check_source
from tiers.store_metadata import Compression


@dataclass(frozen=True)
class Preparation:
    """A vetted recipe: what the actors are started with."""

    recipe: Recipe
    """With what the plan has chosen and sums depend on: micro-batch, chunks, and on CUDA how many layers are kept."""
    spec: ModelSpec
    placement: Placement
    cuda: bool
    device: str
    """The GPU's name, or the CPU with its threads."""
    compute: ComputeSettings
    optimizer: OptimizerSettings
    crew: CrewSettings


def prepare(recipe: Recipe, hardware: Hardware | None = None) -> Preparation:
    """Vet the model and place it on this machine.

    Args:
        recipe: What is to be trained.
        hardware: The machine's rates, by which the plan chooses; None assumes those of its kind.

    Raises:
        UnsupportedModelError, ShardError, ImportedTensorError, CheckpointError: The model cannot be read or trained.
        PlacementError, DeviceUnavailableError: It does not fit this machine.
    """
    spec = spec_of(recipe)
    machine = MachineMemory.of_this_machine(recipe)
    actors, threads = optimizer_shape(recipe, machine.cores)
    shape = shape_of(recipe)
    if recipe.model.source is not None:
        check_source(recipe.model.source, shape[0], recipe.run.dir)
    placement = place_recipe(recipe, shape, machine, optimizer_actors=actors, hardware=hardware)
    recipe = recipe.with_micro_batch(placement.step.micro_batch).with_memory(
        mlp_chunk_tokens=placement.mlp_chunk_tokens,
        # On the CPU a kept layer sums as a recomputed one.
        kept_layers=placement.schedule.kept_layers if machine.cuda else recipe.memory.kept_layers,
    )
    preflight(
        placement,
        host_available_bytes=machine.host_bytes,
        gpu_free_bytes=machine.gpu_bytes,
        nvme_free_bytes=machine.nvme_bytes,
    )
    optimizer, memory = recipe.optimizer, recipe.memory
    adamw = OptimizerSettings(betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
    return Preparation(
        recipe=recipe,
        spec=spec,
        placement=placement,
        cuda=machine.cuda,
        device=machine.gpu_name or f"CPU, {machine.cores} threads",
        compute=ComputeSettings(
            learning_rate=recipe.learning_rate(),
            max_grad_norm=optimizer.max_grad_norm or None,
            device="cuda" if machine.cuda else "cpu",
            decoder_slots=placement.schedule.decoder_slots,
            kept_layers=placement.schedule.kept_layers,
            own_slots=placement.schedule.own_slots,
            boundary_every=placement.schedule.boundary_every,
            waves=placement.schedule.waves,
            mlp_chunk_tokens=placement.mlp_chunk_tokens,
            device_updates=placement.schedule.device_updates,
            optimizer=adamw,
            compile=recipe.train.compile and machine.cuda,
            # On a GPU the CPU threads of torch only prepare work; without one they do it.
            threads=2 if machine.cuda else machine.cores,
        ),
        optimizer=adamw,
        crew=CrewSettings(
            optimizer_actors=actors,
            threads_per_optimizer=threads,
            io_threads=memory.prefetch_threads,
            limit_bytes=None if memory.ram_gib is None else int(memory.ram_gib * GIB),
            nvme_dir=memory.nvme_dir,
            compression=Compression(recipe.checkpoint.compression),
            staging_bytes=placement.staging_bytes,
        ),
    )


def optimizer_shape(recipe: Recipe, cores: int) -> tuple[int, int]:
    """Optimizer actors and threads of each, as the recipe says or as the machine suggests.

    Raises:
        RecipeError: They are more than such a machine can have a use for.
    """
    actors, threads = default_optimizer_actors(cores)
    actors, threads = recipe.memory.optimizer_actors or actors, recipe.memory.threads_per_actor or threads
    check_threads(recipe, actors * threads, cores)
    return actors, threads


@dataclass(frozen=True)
class Data:
    """What a run trains on and is measured on."""

    training: PackedDataset
    held_out: PackedDataset | None


def open_data(recipe: Recipe, spec: ModelSpec, say: Callable[[str], None]) -> Data:
    """Read and pack the recipe's data.

    Raises:
        DataError: It cannot be read, holds what the model cannot take, or nothing to be learned or measured.
    """
    train = recipe.train

    def opened(settings: DataSettings) -> PackedDataset:
        return open_dataset(
            settings,
            sequence_length=train.sequence_length,
            seed=recipe.run.seed,
            vocab_size=spec.vocab_size,
            cache_dir=recipe.token_cache_dir,
            progress=say,
        )

    settings, of_held_out = data_settings(recipe)
    training = opened(settings)
    _require_targets(training, settings, "to train on")
    held_out = opened(of_held_out) if of_held_out is not None else training.held_out
    if held_out is not None:
        _require_targets(held_out, of_held_out or settings, "held out")
    return Data(training, held_out)


def _require_targets(data: PackedDataset, settings: DataSettings, what: str) -> None:
    """Every step, or evaluation, would be skipped otherwise, to the end of a run that looks like one."""
    report = data.report
    if report.supervised_tokens:
        return
    raise DataError(
        f"{settings.key} = {', '.join(map(str, settings.paths))}: none of the {report.tokens:,} tokens {what} is a "
        f"target ({report.documents:,} documents). Each token but a document's first is one, unless its label is "
        f"{IGNORED}: give documents of two tokens or more whose labels are not all {IGNORED}; "
        'data.columns.labels = "" takes no notice of labels'
    )


def data_settings(recipe: Recipe) -> tuple[DataSettings, DataSettings | None]:
    """What the recipe says of the data to train on, and of data held out that has paths of its own."""
    data = recipe.data
    training = DataSettings(
        paths=tuple(map(Path, data.path)),
        left_out=tuple(recipe.own_directories().values()),
        format=data.format,
        text_field=data.text_field,
        tokenizer=str(data.tokenizer),
        append_eos=data.append_eos,
        input_ids_column=data.columns.input_ids,
        labels_column=data.columns.labels or None,
        on_bad_row=data.on_bad_row,
        long_documents=data.long_documents,
        shuffle=data.shuffle,
        eval_fraction=data.eval_fraction or 0.0,
        suffixes=data.suffixes,
    )
    if data.eval_path is None:
        return training, None
    paths = tuple(map(Path, data.eval_path))
    return training, dataclasses.replace(training, paths=paths, shuffle=False, key="data.eval_path")
