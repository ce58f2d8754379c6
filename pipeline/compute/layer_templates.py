"""The templates of a process: one for each device slot and signature of the layers that pass it."""

from __future__ import annotations

from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.template import LayerTemplate
from pipeline.families.family import Family
from tiers.layout import ModelLayout


class LayerTemplates:
    """Makes templates as they are first asked for."""

    def __init__(
        self,
        family: Family,
        model: ModelLayout,
        slots: WeightSlots,
        *,
        compile: bool,
        factor_weights: bool,
        mlp_chunk_tokens: int,
    ) -> None:
        """Start without any.

        Args:
            family: Builds the layers.
            model: The layout.
            slots: Whose buffers the templates are bound to.
            compile: As `LayerTemplate` has it.
            factor_weights: Likewise.
            mlp_chunk_tokens: Likewise.
        """
        self._family = family
        self._model = model
        self._slots = slots
        self._compile = compile
        self._factor_weights = factor_weights
        self._mlp_chunk_tokens = mlp_chunk_tokens
        self._made: dict[tuple[int, object], LayerTemplate] = {}

    def of(self, layer: int, slot: int) -> LayerTemplate:
        """The template that runs `layer` from `slot`."""
        key = (slot, self._family.signature(layer))
        if key not in self._made:
            self._made[key] = LayerTemplate(
                self._family,
                layer,
                self._model.layers[layer],
                self._slots.buffer(slot),
                compile=self._compile,
                factor_weights=self._factor_weights,
                mlp_chunk_tokens=self._mlp_chunk_tokens,
            )
        return self._made[key]
