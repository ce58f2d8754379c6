"""The decoder layers that a measurement of `--gib` works on, and what it is told where they have another size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tiers.layout import LayerKind, LayerLayout, ModelLayout
from tiers.quantities import shown_bytes

NEAR = 1.5
"""Up to this many times more or less than was asked for is about as much: layers are whole."""


def sample_layers(
    model: ModelLayout, num_bytes: int, bytes_per_parameter: int, say: Callable[[str], None], *, multiple_of: int = 1
) -> tuple[LayerLayout, ...]:
    """The first decoder layers of a model, renumbered, about `num_bytes` of them.

    Args:
        model: Whose.
        num_bytes: Asked for.
        bytes_per_parameter: That the measurement holds or moves.
        say: Told where it is not about as much.
        multiple_of: The number of layers is.

    Raises:
        ValueError: The model has fewer than `multiple_of`.
    """
    decoders = [layer for layer in model.layers if layer.kind is LayerKind.DECODER]
    if len(decoders) < multiple_of:
        raise ValueError(f"the model has {len(decoders)} decoder layers, at least {multiple_of} are needed")
    layer_bytes = decoders[0].numel * bytes_per_parameter
    count = max(1, min(len(decoders), round(num_bytes / layer_bytes)) // multiple_of) * multiple_of
    taken_bytes = count * layer_bytes
    if not taken_bytes / NEAR <= num_bytes <= taken_bytes * NEAR:
        why = f"the model has {len(decoders)} layers" if num_bytes > taken_bytes else f"{count} layers are the fewest"
        say(f"note: works on {shown_bytes(taken_bytes)}, not {shown_bytes(num_bytes)} (--gib): {why}")
    return tuple(dataclasses.replace(layer, index=index) for index, layer in enumerate(decoders[:count]))
