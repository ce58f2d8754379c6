"""The actor that computes: the only process that touches the device.

Every public method is one operation of the step graph (or asks for a fact), called with the step's number first and
with the results it had to wait for as ignored trailing arguments. Methods enqueue and return while the device still
works, save those that give the host something (`offload`, `return_state`, `loss`, `norm`, `evaluate_head`) and the
`stage` of a layer whose RAM slot the next one needs. They run in three lanes of threads, because Ray's order within a
lane is no promise and the lanes must not wait for one another; what must come first is an edge of the graph on the
host and a mark between streams on the device.
"""

from __future__ import annotations

import ray
import torch
from ray.actor import ActorClass

from pipeline.compute.activations import Boundaries
from pipeline.compute.device import open_device, register_host_memory, release_pinned_copies, unregister_host_memory
from pipeline.compute.device_slots import WeightSlots
from pipeline.compute.gradient_buffers import OutgoingGradients
from pipeline.compute.lent_states import LentStates
from pipeline.compute.outcome import decide, global_norm, report
from pipeline.compute.passes import Passes
from pipeline.compute.settings import ComputeSettings
from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import open_streams
from pipeline.compute.template import compiled_graphs
from pipeline.families import ModelSpec
from pipeline.messages import Batch, LaneSpan, LossSum, StepControl, StepResult
from tiers.arena import Arena
from tiers.arena_map import ArenaMap, Extent
from tiers.layout import PAGE_BYTES, Buffer, ElementType, round_up, state_buffers
from tiers.parameter_tier import TierHandle

__all__ = ["Compute", "ComputeActor", "ComputeSettings"]

ACTOR_NAME = "compute"


class Compute:
    """Streams layers through the device. Training steps count from 0 or 1 up, evaluation passes below zero."""

    def __init__(self, spec: ModelSpec, tier: TierHandle, settings: ComputeSettings) -> None:
        """Attach to the arena, register it with the device, allocate everything whose size does not vary.

        Raises:
            PipelineError: Not exactly one GPU is visible, or host memory cannot be registered.
            TierError: The arena's owner is gone.
        """
        self._settings = settings
        self._device = open_device(settings)
        self._arena, arena_map = tier.attach()
        model = arena_map.plan.model
        self._registered: list[int] = []
        self._compiled_graphs = 0
        self._register(0, arena_map.registered_bytes)
        self._streams = open_streams(self._device)
        self._spans = SpanRecorder(ACTOR_NAME, settings.record_spans)
        self._layers = model.layers
        weights = [_tensor(self._arena, extent) for extent in arena_map.weights]
        self._gradients = [_tensor(self._arena, extent) for extent in arena_map.gradients]
        room = _tensor(self._arena, arena_map.activations).view(torch.uint8) if arena_map.activations else None
        self._slots = WeightSlots(model, settings.decoder_slots, weights, self._streams, settings.own_slots)
        homes = self._homes = arena_map.plan.homes
        held = {layer for layer, home in enumerate(homes) if home.gradient_on_device}
        self._outgoing = OutgoingGradients(
            model,
            settings.outgoing_buffers,
            self._gradients[0].dtype,
            self._streams,
            held=held,
            updated_here=settings.device_updates,
        )
        self._lent = LentStates(model, self._lendable(arena_map), settings.optimizer, self._streams)
        boundaries = Boundaries(self._streams, room)
        self._passes = Passes(
            spec,
            model,
            settings,
            self._streams,
            self._slots,
            self._outgoing,
            boundaries,
            self._spans,
            {layer: _tensor(self._arena, extent) for layer, extent in arena_map.gradient_sums.items()},
        )

    def ready(self) -> int:
        """Return the device memory taken for good, in bytes: slots, accumulators and outgoing buffers."""
        self._streams.synchronize()
        return self._slots.num_bytes + self._passes.accumulators.num_bytes + self._outgoing.num_bytes

    @ray.method(concurrency_group="transfer")
    def begin(self, step: int, batch: Batch, *after: object) -> None:
        """Give the micro-batches of a step to the device.

        Raises:
            TokenIdError: An id outside the vocabulary; nothing has reached the device and the actor stays usable.
        """
        self._passes.begin(step, batch)

    @ray.method(concurrency_group="transfer")
    def stage(self, step: int, layer: int, slot: int, *after: object) -> None:
        """Copy a layer's weights from the arena into a device slot.

        Weights that live on NVMe are read from a slot that the next `load_weights` overwrites as soon as this returns:
        it then returns when the last byte has been read.
        """
        read = self._slots.stage(layer, slot, self._spans)
        if read is not None and self._homes[layer].weight_slot is not None:
            read.synchronize()

    @ray.method(concurrency_group="compute")
    def forward(self, step: int, layer: int, slot: int, *after: object) -> None:
        """Pass every micro-batch through a layer and keep its inputs for the backward."""
        self._passes.forward(step, layer, slot)

    @ray.method(concurrency_group="compute")
    def head(self, step: int, slot: int, *after: object) -> None:
        """Compute the loss and go back through the head, for every micro-batch."""
        self._passes.head(step, slot)

    @ray.method(concurrency_group="compute")
    def recompute(self, step: int, layer: int, slot: int, *after: object) -> None:
        """Pass every micro-batch through a layer once more; the backward of the next one needs what comes out."""
        self._passes.recompute(step, layer, slot)

    @ray.method(concurrency_group="compute")
    def backward(self, step: int, layer: int, slot: int, *after: object) -> None:
        """Go back through a layer for every micro-batch; its summed gradient is then ready for `offload`."""
        self._passes.backward(step, layer, slot)

    @ray.method(concurrency_group="offload")
    def offload(self, step: int, layer: int, *after: object) -> None:
        """Copy a layer's gradient into the arena; return when the last byte is there."""
        self._outgoing.drain(step, layer, self._gradients[layer], self._spans).synchronize()

    @ray.method(concurrency_group="offload")
    def store_sum(self, step: int, layer: int, *after: object) -> None:
        """Copy the sum of a layer's gradient over the waves so far to the arena."""
        self._passes.carried.store(self._layers[layer], self._spans)

    @ray.method(concurrency_group="transfer")
    def fetch_sum(self, step: int, layer: int, *after: object) -> None:
        """Bring that sum back, for the next wave to go on with."""
        self._passes.carried.fetch(self._layers[layer], self._spans)

    @ray.method(concurrency_group="transfer")
    def lend_state(self, step: int, layer: int, *after: object) -> None:
        """Copy a layer's optimizer state to the device, where it will be updated."""
        self._lent.lend(layer, self._spans)

    @ray.method(concurrency_group="compute")
    def update_on_device(self, step: int, layer: int, slot: int, control: StepControl, *after: object) -> None:
        """Apply a step to a layer in its device slot, or leave every bit where the step is not applied."""
        with self._streams.compute.enqueue(), self._slots.updating(layer, slot) as weights:
            gradient = self._outgoing.read(step, layer)
            self._lent.update(layer, weights, gradient, control, self._spans)
            self._outgoing.discard(step, layer)

    @ray.method(concurrency_group="offload")
    def return_state(self, step: int, layer: int, slot: int, *after: object) -> None:
        """Copy the weights and the state of a layer that was updated here to the arena; return when all is there."""
        self._lent.give_back(layer, self._slots.updated(layer, slot), self._spans).synchronize()
        self._lent.release(layer)

    def discard(self, step: int, layer: int) -> None:
        """Forget a layer's gradient instead of offloading it: for measurements of computation alone."""
        self._outgoing.discard(step, layer)

    @ray.method(concurrency_group="offload")
    def loss(self, step: int, previous: StepControl, *after: object) -> StepControl:
        """Wait for the step's loss and decide on its updates. Only for runs without clipping.

        A gradient that is not finite although the loss is finite is found too late by this; `norm` then names it.
        """
        assert self._settings.max_grad_norm is None, "with clipping the norm decides"
        return decide(previous, self._settings.learning_rate, self._read_loss(step))

    @ray.method(concurrency_group="offload", num_returns=2)
    def norm(self, step: int, control: StepControl, *after: object) -> tuple[StepControl, StepResult]:
        """Wait for the end of the backward, measure the global gradient norm and forget the step.

        Args:
            step: The step; its gradients may still be on their way to the arena.
            control: With clipping, of the step before; without, of this step, from `loss`.
            after: Ignored.

        Returns:
            This step's control, and what the step reports.
        """
        loss, state = self._read_loss(step), self._passes.steps[step]
        assert state.sums_known is not None, "the backward has not come to its end"
        state.sums_known.synchronize()
        sums: list[float] = state.sums_of_squares.tolist()
        limit = self._settings.max_grad_norm
        if limit is not None:
            control = decide(control, self._settings.learning_rate, loss, global_norm(sums), limit)
        self._passes.steps.end(step)
        if compiled_graphs() > self._compiled_graphs and self._device.type == "cuda":
            release_pinned_copies()
        self._compiled_graphs = compiled_graphs()
        result = report(
            control,
            loss,
            sums,
            [layer.name for layer in self._layers],
            gpu_peak_bytes=self._take_peak_bytes(),
            compiled_graphs=self._compiled_graphs,
        )
        return control, result

    @ray.method(concurrency_group="compute")
    def evaluate_head(self, step: int, slot: int, *after: object) -> LossSum:
        """Finish an evaluation pass: return the sum of its token losses."""
        self._passes.evaluate_head(step, slot)
        tokens = self._passes.steps[step].supervised_tokens
        loss_sum = self._read_loss(step)
        self._passes.steps.end(step)
        return LossSum(loss_sum, tokens)

    @ray.method(concurrency_group="offload")
    def take_spans(self) -> tuple[LaneSpan, ...]:
        """Return what the device has done since the last call, and forget it."""
        return self._spans.take()

    def close(self) -> None:
        """Wait for the device and let go of the arena."""
        self._streams.synchronize()
        for address in self._registered:
            unregister_host_memory(address)
        self._arena.close()

    def _register(self, offset_bytes: int, num_bytes: int) -> None:
        """Pin pages of the arena for the device until `close`."""
        if self._device.type == "cuda":
            register_host_memory(self._arena.address + offset_bytes, round_up(num_bytes, PAGE_BYTES))
            self._registered.append(self._arena.address + offset_bytes)

    def _lendable(self, arena_map: ArenaMap) -> dict[int, dict[Buffer, torch.Tensor]]:
        """Pinned weights and optimizer state of the layers that are updated on the device."""
        lendable: dict[int, dict[Buffer, torch.Tensor]] = {}
        for layer in self._settings.device_updates:
            assert self._homes[layer].state_slot is None, f"the state of layer {layer} is not at home in RAM"
            for buffer in state_buffers(arena_map.plan.model.precision):
                extent = arena_map.states[layer][buffer]
                self._register(extent.offset_bytes, extent.num_bytes)
            lendable[layer] = {buffer: _tensor(self._arena, e) for buffer, e in arena_map.states[layer].items()}
        return lendable

    def _read_loss(self, step: int) -> float:
        state = self._passes.steps[step]
        assert state.loss_known is not None, "the head has not been called"
        state.loss_known.synchronize()
        return float(state.loss)

    def _take_peak_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes


def _tensor(arena: Arena, extent: Extent) -> torch.Tensor:
    """The extent's elements as a tensor that shares the arena's memory."""
    stored = torch.from_numpy(arena.view(extent))
    return stored.view(torch.bfloat16) if extent.element is ElementType.BFLOAT16 else stored


# Groups must be named here, not in `.options()`; Ray's types do not know the argument. Without out-of-order execution
# Ray sends an actor's calls in the order of their submission: one that waits for an update would hold up all later
# ones, the next step's among them (Ray 2.60, measured: groups alone do not switch it on).
ComputeActor: ActorClass[Compute] = ray.remote(  # type: ignore[call-overload]
    concurrency_groups={"compute": 1, "transfer": 2, "offload": 3}, allow_out_of_order_execution=True
)(Compute)
