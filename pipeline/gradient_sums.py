"""A layer's gradient from its first micro-batch to the buffer in which it leaves. Used by the compute stream."""

from __future__ import annotations

import torch

from pipeline.gradient_buffers import Accumulators, OutgoingGradients, sum_of_squares
from pipeline.step_state import StepState
from pipeline.template import tensor_views
from tiers.layout import LayerLayout, ModelLayout


class GradientSums:
    """fp32 sums over the micro-batches."""

    def __init__(self, model: ModelLayout, accumulators: Accumulators, outgoing: OutgoingGradients) -> None:
        """Sum in `accumulators` and send what is complete to `outgoing`; both stay the caller's."""
        self._model = model
        self._accumulators = accumulators
        self._outgoing = outgoing

    def views(self, layout: LayerLayout) -> tuple[torch.Tensor, ...]:
        """fp32 sums of a layer's tensors, to add to. The work must be enqueued on the compute stream."""
        return tensor_views(self._accumulators.of(layout), layout)

    def of_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the final norm and of the LM head's matrix."""
        norm, *matrix = self.views(self._model.layers[-1])
        # Tied: the embedding's backward adds the other half, and only then the gradient leaves.
        return norm, (self.views(self._model.layers[0]) if self._model.tied else matrix)[0]

    def finish(self, state: StepState, layer: int) -> None:
        """Enqueue: a layer's gradient is complete; measure it and send it on its way."""
        accumulator = self._accumulators.of(self._model.layers[layer])
        state.sums_of_squares[layer] = sum_of_squares(accumulator)
        self._outgoing.fill(state.step, layer, accumulator)
