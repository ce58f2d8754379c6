"""From a recipe to the placement of its model: what `tasks.train` does before it allocates and `tasks.plan` reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.errors import UnsupportedModelError
from pipeline.families import ModelSpec, load_model_spec, model_layout, read_config
from pipeline.families.planned import PLANNED, planned_model
from pipeline.families.registry import PLANNED_ONLY
from pipeline.machine_memory import MachineMemory
from pipeline.memory.checkpoint_staging import with_checkpoint_staging
from pipeline.memory.device_fit import decoders
from pipeline.memory.footprint import GIB, total
from pipeline.memory.host_footprint import staging_terms
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from pipeline.placement import Placement, PlacementError, PlacementRequest, Room, place
from pipeline.prediction.assumed_hardware import assumed_hardware
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Hardware
from pipeline.prediction.placement_choice import micro_batches_of
from pipeline.prediction.simulate import Prediction, simulate
from pipeline.recipe import Recipe
from pipeline.recipe_limits import beyond_positions, check_layers, checkpoint_at_the_end
from tiers.layout import Buffer, ModelLayout, buffer_types
from tiers.parsing import parse_json


def spec_of(recipe: Recipe) -> ModelSpec:
    """The model that a recipe names, vetted.

    Raises:
        UnsupportedModelError: Its configuration cannot be read or asks for what is not supported.
    """
    return load_model_spec(_config_of(recipe), recipe.precision.precision)


def shape_of(recipe: Recipe) -> tuple[ModelLayout, ComputeShape]:
    """Layout and sizes of the model that a recipe names, also of families that can be planned and not yet trained.

    Raises:
        UnsupportedModelError: As `spec_of`.
    """
    config = _config_of(recipe)
    if isinstance(config, Path):
        config = read_config(config)
    if config.get("model_type") not in PLANNED:
        spec = spec_of(recipe)
        return model_layout(spec), ComputeShape.of_config(spec.config.to_dict())
    planned = planned_model(config, recipe.precision.precision)
    length = recipe.train.sequence_length
    # A token of a windowed layer sees at most the window: on average over the layers.
    seen = sum(min(window or length, length) for window in planned.windows) / len(planned.windows)
    return planned.layout, replace(ComputeShape.of_config(planned.config), attention_window=round(seen))


def notes_of(recipe: Recipe) -> tuple[str, ...]:
    """What is worth knowing of the recipe and its model and does not keep it from being trained."""
    config = _config_of(recipe)
    notes = (
        beyond_positions(recipe, read_config(config) if isinstance(config, Path) else config),
        checkpoint_at_the_end(recipe),
    )
    return tuple(note for note in notes if note is not None)


def planned_only(recipe: Recipe) -> str | None:
    """Why the recipe's model cannot be trained although `shape_of` knows it; None where it can."""
    config = _config_of(recipe)
    if isinstance(config, Path):
        config = read_config(config)
    return PLANNED_ONLY.get(str(config.get("model_type")))


def _config_of(recipe: Recipe) -> Path | dict[str, object]:
    """A Hugging Face directory, or the fields of its configuration."""
    model = recipe.model
    if isinstance(model.config, Path):
        try:
            config = parse_json(model.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"model.config: {model.config} cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise UnsupportedModelError(f"model.config: {model.config} holds no table of fields")
        return config
    if model.config is not None:
        return {**model.config}
    assert model.source is not None
    return model.source


def request_of(
    recipe: Recipe, shape: tuple[ModelLayout, ComputeShape], *, cuda: bool, optimizer_actors: int
) -> PlacementRequest:
    """What the placement of a recipe depends on, the budget left out; with micro-batches of 1 where they are open.

    Raises:
        RecipeError: It counts more decoder layers than the model has.
    """
    train = recipe.train
    micro_batch = 1 if train.micro_batch == "auto" else train.micro_batch
    model, compute = shape
    check_layers(recipe, decoders(model))
    step = StepShape(train.sequence_length, train.sequences_per_step, micro_batch)
    weight_bytes = buffer_types(model.precision)[Buffer.WEIGHT].bytes
    return PlacementRequest(
        model=model,
        compute=compute,
        step=step,
        clip=recipe.optimizer.max_grad_norm > 0,
        processes=ProcessShape(
            optimizer_actors,
            cuda,
            compiled=train.compile and cuda,
            timed_bytes=step.micro_batch_tokens * compute.intermediate_size * weight_bytes,
        ),
        decoder_slots=recipe.memory.decoder_slots,
        gradient_type=recipe.precision.gradient_type,
        device_updates=recipe.memory.device_updates,
        kept_layers=recipe.memory.kept_layers,
        boundary_every=recipe.memory.boundary_every,
        waves=recipe.memory.waves,
        mlp_chunk_tokens=recipe.memory.mlp_chunk_tokens,
    )


def place_recipe(
    recipe: Recipe,
    shape: tuple[ModelLayout, ComputeShape],
    machine: MachineMemory,
    *,
    optimizer_actors: int,
    hardware: Hardware | None = None,
) -> Placement:
    """Place a recipe's model on a machine: what `tasks.plan` shows and `tasks.train` obeys.

    Args:
        recipe: What is to be trained.
        shape: Of its model.
        machine: What it may take.
        optimizer_actors: Of the run.
        hardware: The machine's rates; None assumes those of its kind.

    Raises:
        PlacementError: It does not fit.
    """
    train = recipe.train
    request = request_of(recipe, shape, cuda=machine.cuda, optimizer_actors=optimizer_actors)
    sizes: tuple[int, ...] = ()
    if train.micro_batch == "auto":
        # No wave goes without a micro-batch.
        most = train.sequences_per_step // (recipe.memory.waves or 1)
        sizes = tuple(
            size for size in micro_batches_of(train.sequences_per_step, train.sequence_length) if size <= most
        )
    rates = hardware or assumed_hardware(machine.gpu_name, machine.cores)
    asked, room = staging_of(recipe), room_of(recipe, machine)
    try:
        placement = place(request, room.budget(request.processes), rates, sizes, room)
    except PlacementError as error:
        if not asked:
            raise
        raise PlacementError(
            f"{error}. checkpoint.staging_gib = {recipe.checkpoint.staging_gib} is taken off host memory; lower it"
        ) from error
    return with_checkpoint_staging(placement, asked)


def predict(recipe: Recipe, placement: Placement, hardware: Hardware) -> Prediction:
    """Predict the step of a placed recipe on a machine whose rates are known."""
    _, compute = shape_of(recipe)
    return simulate(CostModel(placement, compute, placement.step, hardware))


def staging_of(recipe: Recipe) -> int | None:
    """Bytes for copies of what a checkpoint has not written yet; None where the recipe leaves them open.

    The last checkpoint of a run has no step after it.
    """
    checkpoint = recipe.checkpoint
    if not checkpoint.every_steps:
        return 0
    return None if checkpoint.staging_gib is None else int(checkpoint.staging_gib * GIB)


def reserved_bytes(recipe: Recipe) -> int:
    """What is taken off host memory before anything is placed: the staging memory that a recipe asks for."""
    return total(staging_terms(staging_of(recipe) or 0))


def room_of(recipe: Recipe, machine: MachineMemory) -> Room:
    """What the machine has, and what the recipe allows of it."""
    memory = recipe.memory
    return Room(
        host_bytes=machine.host_bytes,
        gpu_bytes=machine.gpu_bytes,
        nvme_bytes=machine.nvme_bytes,
        ram_limit=_bytes(memory.ram_gib),
        gpu_limit=_bytes(memory.gpu_gib),
        nvme_limit=_bytes(memory.nvme_gib),
        cuda=machine.cuda,
        reserved_bytes=reserved_bytes(recipe),
    )


def _bytes(gibibytes: float | None) -> int | None:
    return None if gibibytes is None else int(gibibytes * GIB)
