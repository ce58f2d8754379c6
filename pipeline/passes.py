"""What the compute stream does in a step: embedding, decoder layers and head, forward and backward, layer by layer.

All micro-batches pass a layer before the next layer's turn. Everything here only enqueues, in the one thread of the
compute lane (`begin` alone may run beside it, in another).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from pipeline.activations import Boundaries, MicroBatches
from pipeline.attention import build_attention_context
from pipeline.compute_settings import ComputeSettings
from pipeline.device_slots import WeightSlots
from pipeline.errors import DeviceMemoryError
from pipeline.families import ModelSpec, family_of
from pipeline.gradient_buffers import Accumulators, OutgoingGradients, sum_of_squares
from pipeline.head import Head
from pipeline.messages import Batch, Lane
from pipeline.operations import EMBEDDING_SLOT, HEAD_SLOT
from pipeline.spans import SpanRecorder
from pipeline.step_state import StepsInFlight, StepState, check_ids
from pipeline.streams import Streams
from pipeline.template import LayerTemplate, tensor_views
from tiers.layout import LayerLayout, ModelLayout

logger = logging.getLogger(__name__)


class Passes:
    """Enqueues the passes of all steps. Owns the activations; slots and gradient buffers are lent by Compute."""

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelLayout,
        settings: ComputeSettings,
        streams: Streams,
        slots: WeightSlots,
        outgoing: OutgoingGradients,
        boundaries: Boundaries,
        spans: SpanRecorder,
    ) -> None:
        self.accumulators = Accumulators(model, streams.device)
        self.steps = StepsInFlight()
        self._spec = spec
        self._model = model
        self._settings = settings
        self._streams = streams
        self._slots = slots
        self._outgoing = outgoing
        self._boundaries = boundaries
        self._spans = spans
        self._family = family_of(spec)
        self._rotary = self._family.build_rotary(streams.device)
        self._templates: dict[tuple[int, object], LayerTemplate] = {}
        self._head = Head(settings.head_chunk_tokens, compile=settings.compile)
        self._first_kept = self._head_layout.index - settings.kept_layers
        self._end_of_kept = self._head_layout.index
        self._final_norm = self._family.build_final_norm()
        ((norm_name, _),) = self._final_norm.named_parameters()
        norm_view = tensor_views(slots.buffer(HEAD_SLOT), self._head_layout)[0]
        setattr(self._final_norm, norm_name, nn.Parameter(norm_view))

    @property
    def _head_layout(self) -> LayerLayout:
        return self._model.layers[-1]

    def begin(self, step: int, batch: Batch) -> None:
        """Give a step's ids to the device and make its attention contexts.

        Raises:
            TokenIdError: An id that the model has no row for.
        """
        check_ids(batch, self._spec.vocab_size)
        assert batch.supervised_tokens > 0 or step < 0, "a step without supervised tokens has no loss"
        device, count = self._streams.device, len(self._model.layers)
        dtype = self._slots.buffer(HEAD_SLOT).dtype
        with self._streams.prepare.enqueue(), torch.no_grad():
            host_positions = torch.tensor(batch.position_ids, dtype=torch.int64)
            positions = host_positions.to(device)
            contexts = [
                build_attention_context(
                    on_host,
                    self._rotary(on_device, dtype),
                    self._family.windows,
                    single_document=batch.single_document,
                )
                for on_host, on_device in zip(host_positions, positions, strict=True)
            ]
            state = StepState(
                step=step,
                supervised_tokens=batch.supervised_tokens,
                input_ids=list(torch.tensor(batch.input_ids, dtype=torch.int64).to(device)),
                targets=list(torch.tensor(batch.targets, dtype=torch.int64).to(device)),
                contexts=contexts,
                loss=torch.zeros((), dtype=torch.float64, device=device),
                sums_of_squares=torch.zeros(count, dtype=torch.float64, device=device),
                begun=self._streams.prepare.mark(),
            )
        self.steps.add(state)

    def forward(self, step: int, layer: int, slot: int) -> None:
        """Pass every micro-batch through the embedding or a decoder layer."""
        state = self.steps[step]
        if layer == 0:
            self._streams.compute.wait(state.begun)
        with self._reading(f"forward[{layer}]", (layer, slot)) as (weights,), torch.no_grad():
            if layer == 0:
                (matrix,) = tensor_views(weights, self._model.layers[0])
                outputs = [self._family.embed(ids, matrix) for ids in state.input_ids]
            else:
                template = self._template(layer, slot)
                inputs = (self._boundaries.read if state.training else self._boundaries.take)(step, layer)
                if state.training and self._keeps_graph(layer):
                    outputs = self._forward_kept(state, layer, slot, inputs)
                else:
                    pairs = zip(inputs, state.contexts, strict=True)
                    outputs = [template.forward(x, context) for x, context in pairs]
                if state.training:
                    self._boundaries.leave(step, layer)
            above = layer + 1
            may_spill = state.training and above < self._head_layout.index and not self._keeps_graph(above)
            self._boundaries.keep(step, above, outputs, may_spill=may_spill)

    def head(self, step: int, slot: int) -> None:
        """Loss of every micro-batch and the way back through the LM head and the final norm."""
        state, layout = self.steps[step], self._head_layout
        norm_grad, *matrix_grad = tensor_views(self.accumulators.of(layout), layout)
        if self._model.tied:
            # The embedding's backward adds the other half, and only then the gradient leaves.
            matrix_grad = [*tensor_views(self.accumulators.of(self._model.layers[0]), self._model.layers[0])]
        with self._reading("head", *self._head_reads(slot)) as weights:
            matrix = self._vocabulary(weights)
            inputs = self._boundaries.take(step, layout.index)[::-1]
            for targets in state.targets:
                loss, gradient = self._head.loss_and_backward(
                    inputs.pop(),
                    targets,
                    self._final_norm,
                    matrix,
                    1.0 / state.supervised_tokens,
                    norm_grad,
                    matrix_grad[0],
                )
                state.loss += loss
                state.gradients.append(gradient)
            state.loss_known = self._streams.compute.mark()
            self._finish(state, layout)

    def evaluate_head(self, step: int, slot: int) -> None:
        """Sum of the token losses of an evaluation pass."""
        state = self.steps[step]
        with self._reading("evaluate", *self._head_reads(slot)) as weights:
            matrix = self._vocabulary(weights)
            inputs = self._boundaries.take(step, self._head_layout.index)
            for x, targets in zip(inputs, state.targets, strict=True):
                state.loss += self._head.loss(x, targets, self._final_norm, matrix)
            state.loss_known = self._streams.compute.mark()

    def backward(self, step: int, layer: int, slot: int) -> None:
        """Go back through a layer, recomputed from its inputs where it did not keep its graph.

        The embedding needs neither inputs nor weights.
        """
        state, layout = self.steps[step], self._model.layers[layer]
        accumulator = self.accumulators.of(layout)
        with self._reading(f"backward[{layer}]", *([(layer, slot)] if layer else [])):
            if layer == 0:
                (matrix_grad,) = tensor_views(accumulator, layout)
                for ids in state.input_ids:
                    self._family.embed_backward(ids, state.gradients.pop(0), matrix_grad)
            else:
                template = self._template(layer, slot)
                views = template.accumulator_views(accumulator)
                inputs = self._boundaries.take(step, layer)[::-1]
                self._boundaries.prefetch(step, layer - 1)
                graphs = state.graphs.pop(layer, [])[::-1]
                for index, context in enumerate(state.contexts):
                    x, gradient = inputs.pop(), state.gradients[index]
                    state.gradients[index] = (
                        template.backward_kept(graphs.pop(), gradient, views)
                        if graphs
                        else template.backward(x, context, gradient, views)
                    )
            self._finish(state, layout)
            if layer == 0:
                state.sums_known = self._streams.compute.mark()

    def _finish(self, state: StepState, layout: LayerLayout) -> None:
        """A layer's gradient is complete: measure it and send it on its way."""
        accumulator = self.accumulators.of(layout)
        state.sums_of_squares[layout.index] = sum_of_squares(accumulator)
        self._outgoing.fill(state.step, layout.index, accumulator)

    def _keeps_graph(self, layer: int) -> bool:
        return self._first_kept <= layer < self._head_layout.index and layer < self._end_of_kept

    def _forward_kept(self, state: StepState, layer: int, slot: int, inputs: MicroBatches) -> MicroBatches:
        """Pass every micro-batch through a layer that keeps its graphs, or through one that does not for want of room.

        The plan leaves room for what it was told. Where the device has less all the same, this layer and those above
        are recomputed from now on, and so is the one below: head and backward need room too.
        """
        template = self._template(layer, slot)
        pairs = list(zip(inputs, state.contexts, strict=True))
        try:
            kept = [template.forward_kept(x, context) for x, context in pairs]
        except torch.OutOfMemoryError:
            kept = []
        # Only here, where no traceback holds the failed attempt's tensors any more, is its memory free.
        if not kept:
            self._end_of_kept = layer - 1
            state.graphs.pop(layer - 1, None)
            logger.warning(
                "device memory ended at layer %d: from now on %d decoder layers keep their activations instead of %d; "
                "set memory.kept_layers to no more, or memory.gpu_gib lower",
                layer,
                max(0, self._end_of_kept - self._first_kept),
                self._settings.kept_layers,
            )
            return [template.forward(x, context) for x, context in pairs]
        state.graphs[layer] = [graph for _, graph in kept]
        return [y for y, _ in kept]

    def _template(self, layer: int, slot: int) -> LayerTemplate:
        key = (slot, self._family.signature(layer))
        if key not in self._templates:
            layout, buffer = self._model.layers[layer], self._slots.buffer(slot)
            self._templates[key] = LayerTemplate(
                self._family,
                layer,
                layout,
                buffer,
                compile=self._settings.compile,
                # Only there a product of 16-bit matrices can end in fp32.
                factor_weights=self._streams.device.type == "cuda",
                mlp_chunk_tokens=self._settings.mlp_chunk_tokens,
            )
        return self._templates[key]

    def _head_reads(self, slot: int) -> list[tuple[int, int]]:
        """(layer, slot) of what the head reads: itself, then the embedding where it is tied to it."""
        return [(self._head_layout.index, slot), *([(0, EMBEDDING_SLOT)] if self._model.tied else [])]

    def _vocabulary(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The LM head's matrix [vocabulary, hidden], of what `_head_reads` named."""
        layout = self._model.layers[0] if self._model.tied else self._head_layout
        return tensor_views(weights[-1], layout)[-1]

    @contextmanager
    def _reading(self, name: str, *reads: tuple[int, int]) -> Iterator[list[torch.Tensor]]:
        """Enqueue one operation on the compute stream, which reads staged layers, given as (layer, slot), or none."""
        compute = self._streams.compute
        try:
            with compute.enqueue():
                first = self._slots.reading(*reads[0]) if reads else nullcontext()
                second = self._slots.reading(*reads[1]) if len(reads) > 1 else nullcontext()
                with first as one, second as two, self._spans.span(name, Lane.COMPUTE, compute):
                    yield [weights for weights in (one, two) if weights is not None]
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{name} found no device memory ({str(error).splitlines()[0]}); lower memory.kept_layers "
                f"(now {self._settings.kept_layers}), train.micro_batch or train.sequence_length, or memory.gpu_gib, "
                "so that activations wait in RAM"
            ) from error
