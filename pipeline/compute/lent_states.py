"""Optimizer state of a few layers, lent to the device: comes in during the backward, is updated there, goes back.

For layers whose weights lie in a device slot when a step ends and are read first in the next: updated on the host they
would keep the device waiting. The arithmetic is the host kernel's, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.compute.spans import SpanRecorder
from pipeline.compute.streams import Mark, Streams
from pipeline.errors import DeviceMemoryError
from pipeline.messages import Lane, StepControl
from pipeline.updates import adamw
from pipeline.updates.adamw import OptimizerSettings, Scalars
from pipeline.updates.optimizer_pool import decay_runs
from tiers.layout import Buffer, ModelLayout, state_buffers


@dataclass
class _Lent:
    """State of one layer."""

    on_host: Mapping[Buffer, torch.Tensor]
    """Flat views of the arena, the weights included."""
    on_device: dict[Buffer, torch.Tensor] = field(default_factory=dict)
    """Without the weights: those are in a device slot. Empty while nothing is lent."""
    room: Mark | None = None
    """When what used the memory before is done with it."""
    arrived: Mark | None = None
    updated: Mark | None = None


class LentStates:
    """Device copies of the state of the layers that are updated there.

    They have memory only from `lend` to `release`: layers that keep their graphs from forward to backward have it in
    between (`SchedulePlan.in_lent_room`).
    """

    def __init__(
        self,
        model: ModelLayout,
        states: Mapping[int, Mapping[Buffer, torch.Tensor]],
        settings: OptimizerSettings | None,
        streams: Streams,
    ) -> None:
        """Start with nothing lent.

        Args:
            model: The layout.
            states: By layer that is updated on the device: its weights and optimizer state in the arena, flat, pinned;
                owned by the tier.
            settings: Of the optimizer; needed where `states` names any layer.
            streams: Of this process.
        """
        assert settings is not None or not states
        self._settings = settings
        self._streams = streams
        self._runs = {index: decay_runs(model.layers[index]) for index in states}
        self._buffers = state_buffers(model.precision)
        self._lent = {index: _Lent(on_host) for index, on_host in states.items()}
        self._lock = threading.Lock()

    def lend(self, layer: int, spans: SpanRecorder) -> None:
        """Enqueue the way in of a layer's state. The caller must have released its last one.

        Raises:
            DeviceMemoryError: The device has no room for it.
        """
        self._take_room()
        lent, stream = self._lent[layer], self._streams.to_device
        assert lent.room is not None
        stream.wait(lent.room)
        with stream.enqueue(), spans.span(f"lend_state[{layer}]", Lane.H2D, stream, self._state_bytes(layer)):
            for buffer, target in lent.on_device.items():
                target.copy_(lent.on_host[buffer], non_blocking=True)
        lent.arrived = stream.mark()

    def update(
        self, layer: int, weights: torch.Tensor, gradient: torch.Tensor, control: StepControl, spans: SpanRecorder
    ) -> None:
        """Enqueue the update of a layer on the compute stream, or nothing where the step is not applied.

        Args:
            layer: Whose state has been lent.
            weights: Flat weights in the device slot; updated in place.
            gradient: Flat, as it would have been offloaded.
            control: Of the step.
            spans: Receives the update's span.
        """
        lent, compute = self._lent[layer], self._streams.compute
        assert lent.arrived is not None, f"the state of layer {layer} was not lent"
        compute.wait(lent.arrived)
        num_bytes = 2 * (self._state_bytes(layer) + weights.nbytes) + gradient.nbytes
        with spans.span(f"update_on_device[{layer}]", Lane.COMPUTE, compute, num_bytes):
            if control.applied:
                self._apply(layer, weights, gradient, control)
        lent.updated, lent.arrived = compute.mark(), None

    def give_back(self, layer: int, weights: torch.Tensor, spans: SpanRecorder) -> Mark:
        """Enqueue the way back of a layer's weights and state into the arena.

        Returns:
            The mark at which all bytes are there; nobody may read them, or fill the slot of `weights`, before.
        """
        lent, stream = self._lent[layer], self._streams.to_host
        assert lent.updated is not None, f"layer {layer} has not been updated"
        stream.wait(lent.updated)
        num_bytes = self._state_bytes(layer) + weights.nbytes
        with stream.enqueue(), spans.span(f"return_state[{layer}]", Lane.D2H, stream, num_bytes):
            # The weights first: another layer waits for their slot.
            for buffer, source in ({Buffer.WEIGHT: weights} | dict(lent.on_device)).items():
                lent.on_host[buffer].copy_(source, non_blocking=True)
        lent.updated = None
        return stream.mark()

    def release(self, layer: int) -> None:
        """Give up the memory of a layer's state. The caller has synchronised with the mark of its `give_back`."""
        self._lent[layer].on_device = {}

    def _take_room(self) -> None:
        """Give memory to all layers at once: the later ones would else wait for compute work enqueued meanwhile.

        It comes from the compute stream's pool, where the kept graphs leave it, and what that stream has enqueued so
        far may still use it.
        """
        with self._lock, self._streams.compute.enqueue():
            without = [lent for lent in self._lent.values() if not lent.on_device]
            try:
                for lent in without:
                    lent.on_device = {
                        buffer: torch.empty_like(lent.on_host[buffer], device=self._streams.device)
                        for buffer in self._buffers
                    }
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"no device memory for the optimizer state of {len(self._lent)} layers that are updated there "
                    f"({str(error).splitlines()[0]}); set memory.device_updates = false, or lower memory.gpu_gib"
                ) from error
            room = self._streams.compute.mark() if without else None
            for lent in without:
                lent.room = room

    def _apply(self, layer: int, weights: torch.Tensor, gradient: torch.Tensor, control: StepControl) -> None:
        assert self._settings is not None
        state = self._lent[layer].on_device
        low = state.get(Buffer.WEIGHT_LOW)
        for run in self._runs[layer]:
            part = slice(run.start, run.stop)
            scalars = Scalars.of(
                self._settings,
                lr=control.lr,
                applied_steps=control.applied_steps,
                clip_coefficient=control.clip_coefficient,
                decay=run.decay,
            )
            _update(
                weights[part],
                None if low is None else low[part],
                state[Buffer.EXP_AVG][part],
                state[Buffer.EXP_AVG_SQ][part],
                gradient[part],
                scalars,
            )

    def _state_bytes(self, layer: int) -> int:
        return sum(self._lent[layer].on_host[buffer].nbytes for buffer in self._buffers)


def _update(
    weight: torch.Tensor,
    weight_low: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    scalars: Scalars,
) -> None:
    """Update runs on their device: the host's own kernel where the CPU stands in for the GPU."""
    if weight.is_cuda:
        from pipeline.updates.adamw_cuda import update_on_gpu

        update_on_gpu(weight, weight_low, exp_avg, exp_avg_sq, gradient, scalars)
        return
    adamw.update(
        _bits(weight),
        None if weight_low is None else weight_low.numpy(),
        exp_avg.numpy(),
        exp_avg_sq.numpy(),
        _bits(gradient),
        scalars,
    )


def _bits(values: torch.Tensor) -> np.ndarray:
    """A NumPy view, of the bits where NumPy has no such type."""
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
