"""Families whose memory and steps can be planned although they cannot be trained yet: mixtures of experts.

Shapes are read off the Hugging Face layer classes on the meta device, as those of the families that can be trained are.
Only `tasks.plan` uses this; `load_model_spec` refuses such a model with a sentence that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import UnsupportedModelError
from pipeline.families.layout import model_layer, vocabulary_matrix
from tiers.layout import InitKind, LayerKind, ModelLayout, Precision, TensorSpec


@dataclass(frozen=True)
class PlannedFamily:
    """Where transformers keeps the classes of one `model_type`."""

    module: str
    config_class: str
    decoder_layer: str


PLANNED: Mapping[str, PlannedFamily] = {
    "gpt_oss": PlannedFamily("gpt_oss", "GptOssConfig", "GptOssDecoderLayer"),
    "mixtral": PlannedFamily("mixtral", "MixtralConfig", "MixtralDecoderLayer"),
    "qwen3_moe": PlannedFamily("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeDecoderLayer"),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model that is only planned."""

    layout: ModelLayout
    config: Mapping[str, object]
    """All fields, defaults included."""
    windows: tuple[int | None, ...]
    """By decoder layer: tokens that a token sees, None for all before it."""


def planned_model(config: Mapping[str, object], precision: Precision) -> PlannedModel:
    """Read the shape of a model off its configuration.

    Raises:
        UnsupportedModelError: transformers refuses the configuration.
    """
    model_type = str(config["model_type"])
    family = PLANNED[model_type]
    package = f"transformers.models.{family.module}"
    try:
        classes = importlib.import_module(f"{package}.modeling_{family.module}")
        configurations = importlib.import_module(f"{package}.configuration_{family.module}")
        fields = {name: value for name, value in config.items() if name != "model_type"}
        full: Any = getattr(configurations, family.config_class)(**fields)
        layout = _layout(full, getattr(classes, family.decoder_layer), precision)
    except Exception as error:  # transformers raises what it likes for a malformed configuration
        raise UnsupportedModelError(f"transformers refuses the {model_type} configuration: {error}") from error
    return PlannedModel(layout, full.to_dict(), _windows(full))


def _layout(config: Any, decoder_layer: Any, precision: Precision) -> ModelLayout:
    std = float(config.initializer_range)
    matrix = (int(config.vocab_size), int(config.hidden_size))
    layers = [
        model_layer(0, "embedding", LayerKind.EMBEDDING, [vocabulary_matrix("model.embed_tokens.weight", matrix, std)])
    ]
    for index in range(int(config.num_hidden_layers)):
        with torch.device("meta"):
            module = decoder_layer(config, index)
        tensors = [
            TensorSpec(f"model.layers.{index}.{name}", tuple(value.shape), 0, value.ndim >= 2, InitKind.NORMAL, std)
            for name, value in module.named_parameters()
        ]
        layers.append(model_layer(index + 1, f"layer-{index:04d}", LayerKind.DECODER, tensors))
    head = [TensorSpec("model.norm.weight", (int(config.hidden_size),), 0, False, InitKind.ONES)]
    tied = bool(config.tie_word_embeddings)
    if not tied:
        head.append(vocabulary_matrix("lm_head.weight", matrix, std))
    layers.append(model_layer(len(layers), "head", LayerKind.HEAD, head))
    return ModelLayout(tuple(layers), precision, tied)


def _windows(config: Any) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
