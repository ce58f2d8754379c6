"""The head's turn in a step: final norm, LM head and loss for every micro-batch, and in training the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeline.compute.activations import Boundaries
from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.device_work import DeviceWork
from pipeline.compute.gradient_sums import GradientSums
from pipeline.compute.head import Head
from pipeline.compute.step_state import StepState
from pipeline.compute.streams import Streams
from pipeline.compute.template import tensor_views
from pipeline.families.family import Family
from pipeline.step.operations import EMBEDDING_SLOT, HEAD_SLOT
from tiers.layout import ModelLayout


class HeadPass:
    """Enqueues the head's work. The final norm is bound to the head's slot."""

    def __init__(
        self,
        family: Family,
        model: ModelLayout,
        head: Head,
        slots: WeightSlots,
        work: DeviceWork,
        streams: Streams,
    ) -> None:
        self._model = model
        self._layout = model.layers[-1]
        self._head = head
        self._work = work
        self._streams = streams
        self._final_norm = family.build_final_norm()
        ((norm_name, _),) = self._final_norm.named_parameters()
        norm_view = tensor_views(slots.buffer(HEAD_SLOT), self._layout)[0]
        setattr(self._final_norm, norm_name, nn.Parameter(norm_view))

    def loss_and_backward(self, state: StepState, slot: int, boundaries: Boundaries, sums: GradientSums) -> None:
        """Loss of every micro-batch and the way back through the LM head and the final norm."""
        with self._work.reading("head", *self._reads(slot)) as weights:
            matrix, (norm_sum, matrix_sum) = self._vocabulary(weights), sums.open_head()
            inputs = boundaries.take(state.step, self._layout.index)[::-1]
            for targets in state.at_work(state.targets):
                loss, gradient = self._head.loss_and_backward(
                    inputs.pop(),
                    targets,
                    self._final_norm,
                    matrix,
                    1.0 / state.supervised_tokens,
                    norm_sum,
                    matrix_sum,
                )
                state.loss += loss
                state.gradients.append(gradient)
            state.loss_known = self._streams.compute.mark()
            sums.close(state, self._layout.index)

    def loss(self, state: StepState, slot: int, boundaries: Boundaries) -> None:
        """Sum of the token losses of an evaluation pass."""
        with self._work.reading("evaluate", *self._reads(slot)) as weights:
            matrix = self._vocabulary(weights)
            inputs = boundaries.take(state.step, self._layout.index)
            for x, targets in zip(inputs, state.at_work(state.targets), strict=True):
                state.loss += self._head.loss(x, targets, self._final_norm, matrix)
            state.loss_known = self._streams.compute.mark()

    def _reads(self, slot: int) -> list[tuple[int, int]]:
        """(layer, slot) of what the head reads: itself, then the embedding where it is tied to it."""
        return [(self._layout.index, slot), *([(0, EMBEDDING_SLOT)] if self._model.tied else [])]

    def _vocabulary(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The LM head's matrix [vocabulary, hidden], of what `_reads` named."""
        layout = self._model.layers[0] if self._model.tied else self._layout
        return tensor_views(weights[-1], layout)[-1]
