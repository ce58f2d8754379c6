"""Makes a Hugging Face model directory of a stored model: sharded safetensors, index, config, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.recipe import Recipe
from tasks.hf_companions import companion_bytes, companion_config, copy_companions, missing_tokenizer
from tasks.stored_model import ModelTensor, StoredModel
from tiers.durable_files import new_directory, sync_file
from tiers.errors import ShardError, TierError
from tiers.layout import Precision
from tiers.manifest import verify
from tiers.parsing import parse_json
from tiers.preflight import check_free_bytes, nearest_existing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What a user calls the types that an export can have."""

HEAD_NAME = "lm_head.weight"
"""Of every supported family."""

CONFIG = "config.json"
_ENTRY_BYTES = 256
"""Most that a tensor's entries in a header and in the index take beside its name, twice."""
_OTHER_BYTES = 256 << 10
"""Room for the configuration, and for what file systems round up."""


class ExportError(TierError, ValueError):
    """An export that cannot be made as asked; nothing was written."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How a model is written."""

    dtype: str = "source"
    """A key of DTYPES; `source` takes the imported model's own type, or the run's precision after a random start."""
    shard_bytes: int = 5 << 30
    """Most bytes of tensors in a file; a larger tensor has a file of its own."""
    untie: bool = False
    """Write the head of a tied model too, as a copy of the embedding."""


@dataclass(frozen=True, slots=True)
class Export:
    """What was written."""

    directory: Path
    """Absolute."""
    tokenizer: str
    """Which one it has, or why none, in words."""


def export(model: StoredModel, out: Path, settings: ExportSettings) -> Export:
    """Write `model` to `out`, whole or not at all.

    Args:
        model: An open checkpoint; every byte of it is verified first.
        out: Must not exist, or be an empty directory.
        settings: Choices of the user.

    Raises:
        ExportError: `out` is taken or cannot be made, the disk is too full, the checkpoint is damaged, or the run's
            source or tokenizer is gone.
        OSError: The disk refuses.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not an empty directory; name another one, nothing is overwritten")
    recipe, facts = model.recipe(), model.manifest.facts
    config = source_config(recipe)
    if (gone := missing_tokenizer(recipe, facts)) is not None:
        raise ExportError(
            f"the tokenizer {gone} that the recipe names is gone; put it or a link to it back, it belongs into the "
            "export (an empty directory in its place exports without one)"
        )
    dtype = _dtype(settings.dtype, config, model)
    tensors = _named_tensors(model, untie=settings.untie)
    shards = plan_shards({name: t.numel * dtype.itemsize for name, t in tensors.items()}, settings.shard_bytes)
    if problems := verify(model.directory, deep=True):
        raise ExportError(f"{model.directory} is damaged and is not exported: {'; '.join(problems)}")
    total_bytes = sum(t.numel * dtype.itemsize + 2 * len(name) + _ENTRY_BYTES for name, t in tensors.items())
    try:
        check_free_bytes(nearest_existing(out.parent), total_bytes + companion_bytes(recipe, facts) + _OTHER_BYTES)
    except ShardError as error:
        raise ExportError(str(error)) from error
    with ExitStack() as held:
        try:
            partial = held.enter_context(new_directory(out))
        except OSError as error:
            raise ExportError(f"{out} cannot be made: {error}; name another directory") from error
        _write_shards(model, partial, tensors, shards, dtype)
        changes = _config_changes(config, dtype, tied=model.tied and not settings.untie)
        written = config | changes | companion_config(recipe, facts)
        (partial / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
        tokenizer = copy_companions(recipe, facts, partial)
        for path in partial.iterdir():
            path.chmod(0o644)
            sync_file(path)
        partial.chmod(0o755)
    return Export(out, tokenizer)


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Group tensors, in order, into files of at most `shard_bytes` each; a larger tensor is alone."""
    shards: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes.items():
        if not shards or num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= num_bytes
    return shards


def source_config(recipe: Recipe) -> dict[str, object]:
    """The Hugging Face configuration that a run's model was made from.

    Raises:
        ExportError: The file it came from is gone or is no JSON object.
    """
    origin = recipe.model.source if recipe.model.source is not None else recipe.model.config
    if isinstance(origin, dict):
        return dict(origin)
    assert origin is not None, "a recipe has a source or a config"
    path = origin / CONFIG if origin.is_dir() or recipe.model.source is not None else origin
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(
            f"the run's model configuration {path} cannot be read ({error}); put it back, it belongs into the export"
        ) from error
    if not isinstance(config, dict):
        raise ExportError(f"the run's model configuration {path} is not a JSON object")
    return config


def _dtype(asked: str, config: Mapping[str, object], model: StoredModel) -> torch.dtype:
    if asked != "source":
        return DTYPES[asked]
    stated = config.get("dtype") or config.get("torch_dtype")
    for dtype in DTYPES.values():
        if stated == _name(dtype):
            return dtype
    return torch.bfloat16 if model.precision is Precision.BF16 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named_tensors(model: StoredModel, *, untie: bool) -> dict[str, ModelTensor]:
    """Every tensor that the export has, by its name there."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    if untie and model.tied:
        # The embedding layer holds the embedding matrix alone.
        tensors[HEAD_NAME] = model.tensors[0]
    return tensors


def _write_shards(
    model: StoredModel,
    directory: Path,
    tensors: Mapping[str, ModelTensor],
    shards: Sequence[Sequence[str]],
    dtype: torch.dtype,
) -> None:
    single = len(shards) == 1
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # transformers refuses files that do not say they are PyTorch's.
        save_file({name: model.read(tensors[name], dtype) for name in names}, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if not single:
        total_bytes = sum(tensor.numel for tensor in tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _config_changes(config: Mapping[str, object], dtype: torch.dtype, *, tied: bool) -> dict[str, object]:
    """What the export's configuration says otherwise than the source's."""
    # transformers 5 reads `dtype`, older versions and other tools `torch_dtype`.
    changes: dict[str, object] = {"dtype": _name(dtype), "torch_dtype": _name(dtype), "tie_word_embeddings": tied}
    if "architectures" not in config:
        changes["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return changes
