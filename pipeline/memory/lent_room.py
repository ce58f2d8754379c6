"""Memory of optimizer state that is lent to the device: what it takes beyond what layers leave to it. Pure arithmetic.

State of the layers that are updated on the device comes when the backward has passed the last few decoder layers, whose
activations are gone by then, and has left before the next forward comes to these layers again
(`SchedulePlan.in_lent_room`). Their gradients come later still, one after another, while more activations go.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.memory.device_extras import Extras
from pipeline.step.layer_groups import LayerGroups
from tiers.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class Activations:
    """What decoder layers hold from forward to backward."""

    decoders: int
    kept: int
    """Of them, the last ones, that are not recomputed."""
    boundary_every: int
    boundary_bytes: int
    """The input of one layer."""
    graph_bytes: int
    """What one that is not recomputed keeps beside its input."""

    def of_last(self, count: int) -> int:
        """Bytes that the last `count` layers hold, and with them no other layer."""
        kept = min(count, self.kept)
        return (self._inputs(0) - self._inputs(count)) * self.boundary_bytes + kept * self.graph_bytes

    def _inputs(self, without_last: int) -> int:
        """Inputs that are held at most of all layers but the last few."""
        kept = max(0, self.kept - without_last)
        recomputed = self.decoders - without_last - kept
        return LayerGroups(recomputed, self.boundary_every).most_inputs + kept


def lent_bytes(model: ModelLayout, extras: Extras, held: Activations, state_bytes: int, gradient_bytes: int) -> int:
    """Most that lent state and its gradients take beside all activations together.

    Args:
        model: The layout.
        extras: Which layers are updated on the device, and how many leave room to them.
        held: By the layers.
        state_bytes: Bytes a parameter that are lent.
        gradient_bytes: Of its gradient.
    """
    lent = sum(model.layers[layer].numel for layer in extras.device_updates) * state_bytes
    most, gradients = lent - held.of_last(extras.in_lent_room), 0
    for layer in sorted(extras.device_updates, reverse=True):
        gradients += model.layers[layer].numel * gradient_bytes
        # The layer's own input goes with the end of its backward.
        above = max(extras.in_lent_room, held.decoders - max(layer, 1)) if extras.in_lent_room else 0
        most = max(most, lent + gradients - held.of_last(above))
    return max(0, most)
