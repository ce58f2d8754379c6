"""Layers that keep their graph from forward to backward, as many as were planned, or as the device has room for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from pipeline.compute.activations import MicroBatches
from pipeline.compute.step_state import StepState
from pipeline.compute.template import LayerTemplate
from pipeline.families.attention import AttentionContext

logger = logging.getLogger(__name__)


class KeptLayers:
    """The last decoder layers, which are not recomputed."""

    def __init__(self, head: int, count: int) -> None:
        """Begin with as many as were planned.

        Args:
            head: Index of the head layer.
            count: Decoder layers, the last ones.
        """
        self._planned = count
        self._first = head - count
        self._end = head

    def __contains__(self, layer: int) -> bool:
        return self._first <= layer < self._end

    def forward(
        self,
        state: StepState,
        layer: int,
        template: LayerTemplate,
        pairs: Sequence[tuple[torch.Tensor, AttentionContext]],
    ) -> MicroBatches:
        """Pass every micro-batch through a layer that keeps its graphs, or through one that does not for want of room.

        The plan leaves room for what it was told. Where the device has less all the same, this layer and those above
        are recomputed from now on, and so is the one below: head and backward need room too.

        Args:
            state: Of the step; takes the graphs.
            layer: One of these layers.
            template: Of its slot.
            pairs: Input and context of each micro-batch.
        """
        try:
            kept = [template.forward_kept(x, context) for x, context in pairs]
        except torch.OutOfMemoryError:
            kept = []
        # Only here, where no traceback holds the failed attempt's tensors any more, is its memory free.
        if not kept:
            self._end = layer - 1
            state.graphs.pop(layer - 1, None)
            logger.warning(
                "device memory ended at layer %d: from now on %d decoder layers keep their activations instead of %d; "
                "set memory.kept_layers to no more, or memory.gpu_gib lower",
                layer,
                max(0, self._end - self._first),
                self._planned,
            )
            return [template.forward(x, context) for x, context in pairs]
        state.graphs[layer] = [graph for _, graph in kept]
        return [y for y, _ in kept]
