"""Which decoder layers keep their input from forward to backward, and which are recomputed from one further down.

Pure arithmetic that the schedule, the device's passes and the footprint share. Boundary activations thin out: of the
layers that are recomputed only every K-th keeps its input, and the backward of a group of K layers first goes forward
through it. The last group needs no such detour: the inputs that it would make anew are made last by the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of `every` decoder layers, from layer 1 up; the last may be shorter."""

    recomputed: int
    """Decoder layers 1 to this are recomputed; those above keep their graph and their input."""
    every: int = 1
    """K: one input is kept for so many layers."""

    @property
    def count(self) -> int:
        """Groups: as many inputs are kept from forward to backward, beside the others of the last group."""
        return -(-self.recomputed // self.every)

    @property
    def most_inputs(self) -> int:
        """Inputs of recomputed layers that are held at once.

        Those of all groups, with all of the last one's; or, that one done, with all that the group below makes anew.
        """
        if not self.recomputed:
            return 0
        whole = len(self.group(self.recomputed))
        return max(self.count - 1 + whole, self.count - 2 + self.every)

    def group(self, layer: int) -> range:
        """Layers of the group of a recomputed layer."""
        first = (layer - 1) // self.every * self.every + 1
        return range(first, min(first + self.every, self.recomputed + 1))

    def rank(self, layer: int) -> int | None:
        """Number of the group that starts with `layer`, from 0; None where none does."""
        starts_group = 1 <= layer <= self.recomputed and (layer - 1) % self.every == 0
        return (layer - 1) // self.every if starts_group else None

    def keeps_input(self, layer: int) -> bool:
        """Whether a decoder layer's input stays from forward to backward."""
        return layer > self.recomputed or self.rank(layer) is not None or self._in_last_group(layer)

    def made_again(self, layer: int) -> range:
        """Layers to go forward through, once the backward comes to `layer`, to have the inputs of its group again."""
        if not 1 <= layer <= self.recomputed or self._in_last_group(layer):
            return range(0)
        group = self.group(layer)
        return group[:-1] if layer == group[-1] else range(0)

    def needed_next(self, layer: int) -> int:
        """Layer whose kept input is needed after the backward of `layer`: the next one's, or its group's."""
        below = layer - 1
        if below < 1 or self.keeps_input(below):
            return below
        return self.group(below)[0]

    def _in_last_group(self, layer: int) -> bool:
        return self.recomputed > 0 and layer >= self.group(self.recomputed)[0]
