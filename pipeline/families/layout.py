"""Gives every parameter of a model its layer, place, decay and start, read off the real modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pipeline.families.family import Family, family_of
from pipeline.families.spec import ModelSpec
from tiers.layout import InitKind, LayerKind, LayerLayout, ModelLayout, TensorSpec, place_tensors

EMBEDDING_NAME = "model.embed_tokens.weight"
LM_HEAD_NAME = "lm_head.weight"
FINAL_NORM_PREFIX = "model.norm."

DEFAULT_INITIALIZER_RANGE = 0.02
"""What transformers takes where a configuration has none, or 0 (`PreTrainedModel._init_weights`)."""


def model_layout(spec: ModelSpec) -> ModelLayout:
    """Lay out a model: embedding, decoder layers, head.

    Weight decay applies to tensors of two or more dimensions, embedding included, and to no norm or bias. Matrices
    start normal with `initializer_range`, norms at one, biases at zero, as in transformers.
    """
    family = family_of(spec)
    std = float(spec.config.initializer_range or DEFAULT_INITIALIZER_RANGE)
    matrix = (spec.vocab_size, spec.hidden_size)
    decoder_layers = range(1, spec.num_decoder_layers + 1)
    parts = {
        family.signature(index): list(_tensors(family.build_decoder_layer(index), std)) for index in decoder_layers
    }
    layers = [model_layer(0, "embedding", LayerKind.EMBEDDING, [vocabulary_matrix(EMBEDDING_NAME, matrix, std)])]
    for index in decoder_layers:
        tensors = _prefixed(family.parameter_prefix(index), parts[family.signature(index)])
        layers.append(model_layer(index, f"layer-{index - 1:04d}", LayerKind.DECODER, tensors))
    head = _prefixed(FINAL_NORM_PREFIX, list(_tensors(family.build_final_norm(), std)))
    if not spec.tied:
        head.append(vocabulary_matrix(LM_HEAD_NAME, matrix, std))
    layers.append(model_layer(len(layers), "head", LayerKind.HEAD, head))
    return ModelLayout(tuple(layers), spec.precision, spec.tied)


def layer_parameter_names(family: Family, layout: LayerLayout) -> tuple[str, ...]:
    """Names of a decoder layer's tensors inside its module, in the order of the layout."""
    prefix = family.parameter_prefix(layout.index)
    return tuple(tensor.name.removeprefix(prefix) for tensor in layout.tensors)


def model_layer(index: int, name: str, kind: LayerKind, tensors: list[TensorSpec]) -> LayerLayout:
    """A layer of tensors that have no places yet."""
    placed, numel = place_tensors(tensors)
    return LayerLayout(index, name, kind, placed, numel)


def vocabulary_matrix(name: str, shape: tuple[int, ...], std: float) -> TensorSpec:
    """The embedding or the LM head, its place not yet given."""
    return TensorSpec(name, shape, 0, True, InitKind.NORMAL, std)


def _prefixed(prefix: str, tensors: list[TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(prefix + t.name, t.shape, 0, t.decay, t.init, t.std) for t in tensors]


def _tensors(module: nn.Module, std: float) -> Iterator[TensorSpec]:
    """The parameters of `module` by their names in it, places not yet given."""
    kinds = {id(parameter): kind for owner in module.modules() for parameter, kind in _kinds(owner)}
    for name, parameter in module.named_parameters():
        kind = kinds[id(parameter)]
        shape = tuple(parameter.shape)
        yield TensorSpec(name, shape, 0, len(shape) >= 2, kind, std if kind is InitKind.NORMAL else 0.0)
    assert not list(module.named_buffers()), "a layer with buffers needs room for them in its template"


def _kinds(owner: nn.Module) -> Iterator[tuple[torch.nn.Parameter, InitKind]]:
    """How each parameter that `owner` holds itself starts: the rules of `PreTrainedModel._init_weights`."""
    for name, parameter in owner.named_parameters(recurse=False):
        if isinstance(owner, nn.Linear):
            yield parameter, InitKind.ZEROS if name == "bias" else InitKind.NORMAL
        elif "RMSNorm" in type(owner).__name__:
            yield parameter, InitKind.ONES
        else:
            raise AssertionError(f"no rule how {type(owner).__name__}.{name} starts")
