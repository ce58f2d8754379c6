"""What the compute stream does in a step: embedding, decoder layers and head, forward and backward, layer by layer.

All micro-batches pass a layer before the next layer's turn. Everything here only enqueues, in the one thread of the
compute lane (`begin` alone may run beside it, in another).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeline.compute.activations import Boundaries
from pipeline.compute.carried_sums import CarriedSums
from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.device_work import DeviceWork
from pipeline.compute.gradient_buffers import Accumulators, OutgoingGradients
from pipeline.compute.gradient_sums import GradientSums
from pipeline.compute.head import Head
from pipeline.compute.head_pass import HeadPass
from pipeline.compute.kept_layers import KeptLayers
from pipeline.compute.layer_templates import LayerTemplates
from pipeline.compute.settings import ComputeSettings
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.step_state import StepsInFlight, StepState, check_ids
from pipeline.compute.streams import Streams
from pipeline.compute.template import tensor_views
from pipeline.families import ModelSpec, family_of
from pipeline.families.attention import build_attention_context
from pipeline.messages import Batch
from pipeline.step.layer_groups import LayerGroups
from pipeline.step.operations import HEAD_SLOT
from tiers.layout import ModelLayout


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
        gradient_sums: Mapping[int, torch.Tensor],
    ) -> None:
        self.accumulators = Accumulators(model, streams.device, min(settings.waves, 2))
        self.carried = CarriedSums(self.accumulators, gradient_sums, streams)
        self.steps = StepsInFlight()
        self._spec = spec
        self._model = model
        self._streams = streams
        self._slots = slots
        self._boundaries = boundaries
        self._sums = GradientSums(model, self.accumulators, outgoing, self.carried if settings.waves > 1 else None)
        self._waves = settings.waves
        self._family = family_of(spec)
        self._rotary = self._family.build_rotary(streams.device)
        self._templates = LayerTemplates(
            self._family,
            model,
            slots,
            compile=settings.compile,
            # Only there a product of 16-bit matrices can end in fp32.
            factor_weights=streams.device.type == "cuda",
            mlp_chunk_tokens=settings.mlp_chunk_tokens,
        )
        head = model.layers[-1].index
        self._kept = KeptLayers(head, settings.kept_layers)
        self._groups = LayerGroups(head - 1 - settings.kept_layers, settings.boundary_every)
        self._work = DeviceWork(streams, slots, spans, settings.kept_layers)
        self._head = HeadPass(
            self._family,
            model,
            Head(settings.head_chunk_tokens, compile=settings.compile),
            slots,
            self._work,
            streams,
        )

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
                waves=self._waves if step >= 0 else 1,
            )
        self.steps.add(state)

    def forward(self, step: int, layer: int, slot: int) -> None:
        """Pass every micro-batch through the embedding, where a wave begins, or through a decoder layer."""
        state = self.steps[step]
        if layer == 0:
            state.begin_wave()
            self._streams.compute.wait(state.begun)
        with self._work.reading(f"forward[{layer}]", (layer, slot)) as (weights,), torch.no_grad():
            if layer == 0:
                (matrix,) = tensor_views(weights, self._model.layers[0])
                outputs = [self._family.embed(ids, matrix) for ids in state.at_work(state.input_ids)]
            else:
                template = self._templates.of(layer, slot)
                stays = state.training and self._groups.keeps_input(layer)
                inputs = (self._boundaries.read if stays else self._boundaries.take)(step, layer)
                pairs = list(zip(inputs, state.at_work(state.contexts), strict=True))
                if state.training and layer in self._kept:
                    outputs = self._kept.forward(state, layer, template, pairs)
                else:
                    outputs = [template.forward(x, context) for x, context in pairs]
                if stays:
                    self._boundaries.leave(step, layer)
            piece = self._groups.rank(layer + 1) if state.training else None
            self._boundaries.keep(step, layer + 1, outputs, piece=piece)

    def recompute(self, step: int, layer: int, slot: int) -> None:
        """Pass every micro-batch through a decoder layer again, for the input of the next one."""
        state = self.steps[step]
        with self._work.reading(f"recompute[{layer}]", (layer, slot)):
            template = self._templates.of(layer, slot)
            pairs = zip(self._boundaries.read(step, layer), state.at_work(state.contexts), strict=True)
            self._boundaries.keep(step, layer + 1, [template.forward(x, context) for x, context in pairs])

    def head(self, step: int, slot: int) -> None:
        """Loss of every micro-batch and the way back through the LM head and the final norm."""
        self._head.loss_and_backward(self.steps[step], slot, self._boundaries, self._sums)

    def evaluate_head(self, step: int, slot: int) -> None:
        """Sum of the token losses of an evaluation pass."""
        self._head.loss(self.steps[step], slot, self._boundaries)

    def backward(self, step: int, layer: int, slot: int) -> None:
        """Go back through a layer, recomputed from its inputs where it did not keep its graph.

        The embedding needs neither inputs nor weights.
        """
        state = self.steps[step]
        with self._work.reading(f"backward[{layer}]", *([(layer, slot)] if layer else [])):
            views = self._sums.open(layer)
            if layer == 0:
                gradients = (state.embedding_gradients + state.gradients)[::-1]
                state.embedding_gradients, state.gradients = [], []
                for ids in state.input_ids:
                    self._family.embed_backward(ids, gradients.pop(), views[0])
            else:
                template = self._templates.of(layer, slot)
                inputs = self._boundaries.take(step, layer)[::-1]
                self._boundaries.prefetch(step, self._groups.needed_next(layer))
                graphs = state.graphs.pop(layer, [])[::-1]
                for index, context in enumerate(state.at_work(state.contexts)):
                    x, gradient = inputs.pop(), state.gradients[index]
                    state.gradients[index] = (
                        template.backward_kept(graphs.pop(), gradient, views)
                        if graphs
                        else template.backward(x, context, gradient, views)
                    )
            self._sums.close(state, layer)
            if layer == 0:
                state.sums_known = self._streams.compute.mark()
