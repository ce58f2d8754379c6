"""Where the bytes of model state lived: sizes from the recipe's model, places from what the run was seen to load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.families import model_layout
from pipeline.homes import homes
from pipeline.recipe import RecipeError, parse_recipe
from pipeline.recipe_placement import spec_of
from tasks.report_page.run_events import EventIndex
from tasks.report_page.run_record import RECIPE, RunRecord
from tiers.errors import TierError
from tiers.layout import Buffer, ModelLayout, Precision, buffer_types, stored_buffers

NAMES = {
    Buffer.WEIGHT: "weights",
    Buffer.WEIGHT_LOW: "low half of the fp32 master",
    Buffer.EXP_AVG: "first moment",
    Buffer.EXP_AVG_SQ: "second moment",
    Buffer.GRADIENT: "gradient slots",
}


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes of one kind of buffer over all layers, by where they live between uses."""

    name: str
    ram_bytes: int
    nvme_bytes: int


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model state of a run."""

    num_parameters: int
    model_type: str
    buffers: tuple[BufferBytes, ...]


def state_bytes(record: RunRecord, index: EventIndex) -> StateBytes | str:
    """Work out what lived where; a reason in words where that cannot be known."""
    if record.recipe_toml is None:
        return f"{RECIPE} is missing, so that the model is not known."
    try:
        recipe = parse_recipe(record.recipe_toml, RECIPE)
        spec = spec_of(recipe)
        model = model_layout(spec)
    except (RecipeError, PipelineError, TierError, OSError) as error:
        return f"The model cannot be read any more: {error}"
    read = sum(value for value in record.column("nvme_read_bytes") if value == value)
    if read and not (index.nvme_state or index.nvme_weights):
        return "Layers were loaded from NVMe, and events.jsonl does not say which (log.events_max_mib)."
    types = buffer_types(model.precision, recipe.precision.gradient_type)
    buffers = []
    for buffer in stored_buffers(model.precision):
        on_nvme = index.nvme_weights if buffer is Buffer.WEIGHT else index.nvme_state
        size = types[buffer].bytes
        ram = _numel(model, [layer.index for layer in model.layers if layer.index not in on_nvme])
        nvme = _numel(model, on_nvme)
        name = "weights, their own master" if _is_master(buffer, model.precision) else NAMES[buffer]
        buffers.append(BufferBytes(name, ram * size, nvme * size))
    clip = recipe.optimizer.max_grad_norm > 0
    slots: dict[int, int] = {}
    for layer, home in zip(model.layers, homes(model, clip=clip, state=[], weights=[], staging_slots=1), strict=True):
        slots[home.gradient_slot] = max(slots.get(home.gradient_slot, 0), layer.numel)
    buffers.append(BufferBytes(NAMES[Buffer.GRADIENT], sum(slots.values()) * types[Buffer.GRADIENT].bytes, 0))
    return StateBytes(model.num_parameters, spec.model_type, tuple(buffers))


def _numel(model: ModelLayout, layers: Iterable[int]) -> int:
    return sum(model.layers[layer].numel for layer in layers if layer < len(model.layers))


def _is_master(buffer: Buffer, precision: Precision) -> bool:
    return buffer is Buffer.WEIGHT and precision is Precision.FP32
