"""How gradient sums pass from wave to wave: out of the device after a layer's backward, back before its next one."""

from __future__ import annotations

from pipeline.step.graph import Graph, Resource
from pipeline.step.operations import Key, Op

AHEAD = 3
"""Layers before the end of the forward pass at which the first sums come back: the link then has weights to carry for
no more than that, and the head would else wait."""


class SumOrder:
    """Adds to a graph the ways of fp32 sums; the embedding's stay on the device, since its backward comes once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._plan = graph.plan

    def resource(self, layer: int) -> tuple[Resource, ...]:
        """The accumulator that a layer uses in turn with others; none where a step is one wave."""
        return (Resource("sum", self._plan.accumulator(layer)),) if self._plan.waves > 1 and layer else ()

    def fetch(self, layer: int, wave: int) -> tuple[Key, ...]:
        """The operation that brings the sum of the waves before; none in the first wave."""
        if wave == 0 or layer == 0:
            return ()
        after: tuple[Key, ...] = (Key(Op.STORE_SUM, layer, wave=wave - 1),)
        if layer >= self._plan.head - 1:
            after += (Key(Op.FORWARD, max(0, self._plan.head - AHEAD), wave=wave),)
        accumulator = self.resource(layer)
        return (
            self._graph.add(Key(Op.FETCH_SUM, layer, wave=wave), after=after, takes=accumulator, holds=accumulator),
        )

    def store(self, layer: int, wave: int, summed: Key) -> None:
        """What follows on a layer's backward in every wave but the last."""
        self._graph.add(
            Key(Op.STORE_SUM, layer, wave=wave),
            after=(summed,),
            takes=self._graph.gradient(layer),
            holds=self.resource(layer),
        )
