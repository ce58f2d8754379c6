"""What the order of a training step depends on: which slots layers use, and which of them are treated otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.step.layer_groups import LayerGroups
from pipeline.step.operations import EMBEDDING_SLOT, HEAD_SLOT
from tiers.layout import LayerKind


@dataclass(frozen=True)
class SchedulePlan:
    """Of one placement; the same for every step of a run."""

    kinds: tuple[LayerKind, ...]
    """Of each layer in forward order: EMBEDDING, DECODER ..., HEAD."""
    tied: bool
    clip: bool
    """Global clipping: updates wait for the norm and run in forward order."""
    decoder_slots: int = 2
    """Device slots that the decoder layers share: 2 is double buffering."""
    outgoing_buffers: int = 2
    """Device buffers that hold finished gradients until they have left."""
    weight_slots: tuple[int | None, ...] = ()
    """By layer: RAM slot of weights that live on NVMe; empty or None where they live in RAM."""
    state_slots: tuple[int | None, ...] = ()
    """By layer: RAM slot of state that lives on NVMe; empty or None where it lives in RAM."""
    gradient_slots: tuple[int, ...] = ()
    """By layer: its first gradient slot in RAM; empty means one of its own for every layer."""
    gradient_spans: tuple[int, ...] = ()
    """By layer: how many gradient slots it takes, side by side; empty means one."""
    device_gradients: tuple[bool, ...] = ()
    """By layer: whether the gradient waits for the norm in a device buffer of its own; empty means none does. Only
    with clipping."""
    device_updates: tuple[int, ...] = ()
    """Layers that are updated on the device, ascending: of those that lie in a device slot when a step ends (the
    embedding, the first decoder layers) and are at home in RAM. Only with clipping, where the next forward would wait
    for them."""
    kept_layers: int = 0
    """Decoder layers, the last ones, that keep their graph on the device from forward to backward: no recompute."""
    own_slots: int = 0
    """Decoder layers, the last ones, whose weights have device slots of their own and are streamed once a step."""
    in_lent_room: int = 0
    """Decoder layers, the last ones, whose activations use the memory of lent state before it comes and after it has
    gone."""
    boundary_every: int = 1
    """Of the recomputed decoder layers one in so many keeps its input for the backward, which makes the others' anew.
    With more than this many decoder slots their weights are streamed no more often for it."""
    waves: int = 1
    """Parts of a step's micro-batches that pass all layers one after another; fp32 sums of gradients wait for the next
    in RAM, in a gradient slot of every layer's own."""

    @property
    def num_layers(self) -> int:
        """Embedding and head included."""
        return len(self.kinds)

    @property
    def head(self) -> int:
        """Index of the head layer, the last."""
        return len(self.kinds) - 1

    @property
    def groups(self) -> LayerGroups:
        """Which decoder layers keep their input."""
        return LayerGroups(self.head - 1 - self.kept_layers, self.boundary_every)

    def device_slot(self, layer: int) -> int:
        """Device slot that holds `layer` while it is at work."""
        if self.kinds[layer] is LayerKind.DECODER:
            if layer >= self.head - self.own_slots:
                return self.decoder_slots + self.head - 1 - layer
            return (layer - 1) % self.decoder_slots
        return EMBEDDING_SLOT if layer == 0 else HEAD_SLOT

    def weight_slot(self, layer: int) -> int | None:
        """RAM slot that stages the layer's weights from NVMe, or None."""
        return self.weight_slots[layer] if self.weight_slots else None

    def state_slot(self, layer: int) -> int | None:
        """RAM slot that stages the layer's optimizer state from NVMe, or None."""
        return self.state_slots[layer] if self.state_slots else None

    def ram_gradient(self, layer: int) -> range:
        """RAM slots that hold the layer's gradient from `offload` to `update`."""
        first = self.gradient_slots[layer] if self.gradient_slots else layer
        return range(first, first + (self.gradient_spans[layer] if self.gradient_spans else 1))

    def accumulator(self, layer: int) -> int:
        """Accumulator of a layer's gradient: of a step in waves one works while the other's sum leaves or comes."""
        return (self.head - layer) % 2 if self.waves > 1 and layer else 0

    def gradient_on_device(self, layer: int) -> bool:
        """Whether the layer's gradient stays on the device until the norm, beyond the end of its backward."""
        return layer in self.device_updates or (bool(self.device_gradients) and self.device_gradients[layer])
