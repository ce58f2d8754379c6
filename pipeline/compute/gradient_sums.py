"""A layer's gradient from its first micro-batch to the buffer in which it leaves. Used by the compute stream."""

from __future__ import annotations

import torch

from pipeline.compute.carried_sums import CarriedSums
from pipeline.compute.gradient_buffers import Accumulators, OutgoingGradients, sum_of_squares
from pipeline.compute.step_state import StepState
from pipeline.compute.template import tensor_views
from tiers.layout import LayerLayout, ModelLayout


class GradientSums:
    """fp32 sums over the micro-batches."""

    def __init__(
        self,
        model: ModelLayout,
        accumulators: Accumulators,
        outgoing: OutgoingGradients,
        carried: CarriedSums | None = None,
    ) -> None:
        """Sum in `accumulators` and send what is complete to `outgoing`.

        Args:
            model: The layout.
            accumulators: Where gradients are summed; the caller's.
            outgoing: Where they go; the caller's.
            carried: Of a step in waves: the way of sums from one to the next.
        """
        self._model = model
        self._accumulators = accumulators
        self._outgoing = outgoing
        self._carried = carried

    def open(self, layer: int) -> tuple[torch.Tensor, ...]:
        """fp32 sums of a layer's tensors, to add to. The work must be enqueued on the compute stream."""
        layout = self._model.layers[layer]
        if self._carried is not None:
            self._carried.open(layout)
        return self._views(layout)

    def open_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the final norm and of the LM head's matrix."""
        norm, *matrix = self.open(len(self._model.layers) - 1)
        # Tied: the embedding's backward adds the other half, and only then the gradient leaves.
        return norm, (self._views(self._model.layers[0]) if self._model.tied else matrix)[0]

    def close(self, state: StepState, layer: int) -> None:
        """Enqueue what follows on the last micro-batch of a wave: a complete gradient is measured and sent away."""
        layout = self._model.layers[layer]
        if state.in_last_wave:
            accumulator = self._accumulators.of(layout)
            state.sums_of_squares[layer] = sum_of_squares(accumulator)
            self._outgoing.fill(state.step, layer, accumulator)
        if self._carried is not None:
            self._carried.close(layout)

    def _views(self, layout: LayerLayout) -> tuple[torch.Tensor, ...]:
        return tensor_views(self._accumulators.of(layout), layout)
