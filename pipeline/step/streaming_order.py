"""The order in which layers pass the device: staged, gone through forward, recomputed, gone through backward."""

from __future__ import annotations

from pipeline.step.graph import Graph, Resource
from pipeline.step.operations import Key, Op, Pass
from pipeline.step.sum_order import SumOrder


class StreamingOrder:
    """Adds to a graph what streams and computes; nothing that follows on a gradient."""

    def __init__(self, graph: Graph, sums: SumOrder) -> None:
        self._graph = graph
        self._plan = graph.plan
        self._sums = sums
        self._lies: dict[Resource, Key] = {}
        """By device slot: the STAGE of the layer that lies there."""
        self._weights_in_ram_slot: dict[int, int] = {}
        self._last_compute = Key(Op.BEGIN)

    def forward_pass(self, wave: int = 0) -> None:
        """Every layer forward; the head is staged and no more."""
        plan, graph = self._plan, self._graph
        if wave == 0:
            graph.add(Key(Op.BEGIN))
        for layer in range(plan.num_layers):
            staged = self._staged(layer, Pass.FORWARD, wave)
            if layer < plan.head:
                takes_lent_room = wave == 0 and layer == plan.head - plan.in_lent_room
                self._last_compute = graph.add(
                    Key(Op.FORWARD, layer, wave=wave),
                    after=(*staged, self._last_compute),
                    after_last=self._lent_room_is_free() if takes_lent_room else (),
                    holds=(graph.device(layer),),
                )

    def evaluate(self) -> None:
        """The loss alone, after a forward pass."""
        staged = self._lies[self._graph.device(self._plan.head)]
        self._graph.add(Key(Op.EVALUATE), after=(staged, self._last_compute))

    def head(self, wave: int) -> Key:
        """Loss and backward of the head, after a forward pass."""
        graph, head = self._graph, self._plan.head
        summed = self._sums.fetch(head, wave)
        self._last_compute = graph.add(
            Key(Op.HEAD, wave=wave),
            after=(self._lies[graph.device(head)], self._last_compute, *summed),
            takes=(*self._leaves_in(head, wave), *self._sums.resource(head)),
            holds=(graph.device(head), graph.device(0), *self._sums.resource(head)),
        )
        return self._last_compute

    def backward(self, layer: int, wave: int) -> Key:
        """Backward of a layer, behind all that its group must make anew for it."""
        graph = self._graph
        for lower in self._plan.groups.made_again(layer):
            staged = self._staged(lower, Pass.RECOMPUTE, wave)
            self._last_compute = graph.add(
                Key(Op.RECOMPUTE, lower, Pass.RECOMPUTE, wave),
                after=(self._last_compute, *staged),
                holds=(graph.device(lower),),
            )
        # The embedding's backward needs no weights.
        staged = self._staged(layer, Pass.BACKWARD, wave) if layer else ()
        summed = self._sums.fetch(layer, wave)
        self._last_compute = graph.add(
            Key(Op.BACKWARD, layer, Pass.BACKWARD, wave),
            after=(self._last_compute, *staged, *summed),
            takes=(*self._leaves_in(layer, wave), *self._sums.resource(layer)),
            holds=(*((graph.device(layer),) if layer else ()), *self._sums.resource(layer)),
        )
        return self._last_compute

    def stage(self, layer: int, pass_: Pass, wave: int) -> Key:
        """Bring a layer's weights to its slot."""
        plan, graph = self._plan, self._graph
        key = self._lies[graph.device(layer)] = Key(Op.STAGE, layer, pass_, wave)
        first = pass_ is Pass.FORWARD and wave == 0
        takes: tuple[Resource, ...] = (graph.device(layer),)
        if layer in (0, plan.head) and not plan.tied:
            # They may lie in the same memory.
            other = graph.device(plan.head - layer)
            self._lies.pop(other, None)
            takes = (*takes, other) if layer else takes
        if layer in plan.device_updates and first:
            # It lies in its slot already, newer than in RAM; only an evaluation in between, which runs alone, makes
            # this a copy.
            return graph.add(key, after_last=(Key(Op.UPDATE_ON_DEVICE, layer),))
        after: tuple[Key, ...] = ()
        after_last: tuple[Key, ...] = (Key(Op.UPDATE, layer),) if first else ()
        if layer in plan.device_updates:
            after_last += (Key(Op.RETURN_STATE, layer),)
        ram_slot = plan.weight_slot(layer)
        holds: tuple[Resource, ...] = ()
        if ram_slot is not None:
            holds = (Resource("weight", ram_slot),)
            if self._weights_in_ram_slot.get(ram_slot) != layer:
                self._weights_in_ram_slot[ram_slot] = layer
                stored = (Key(Op.STORE_STATE, layer),) if first else ()
                after += (graph.add(Key(Op.LOAD_WEIGHTS, layer, pass_, wave), after_last=stored, takes=holds),)
        return graph.add(key, after=after, after_last=after_last, takes=takes, holds=holds)

    def _staged(self, layer: int, pass_: Pass, wave: int) -> tuple[Key, ...]:
        """The STAGE to wait for, added here; none where the layer still lies in its slot."""
        lying = self._lies.get(self._graph.device(layer))
        return () if lying is not None and lying.layer == layer else (self.stage(layer, pass_, wave),)

    def _leaves_in(self, layer: int, wave: int) -> tuple[Resource, ...]:
        """The buffer that a gradient is written to once it is complete, in the last wave."""
        return (self._graph.outgoing(layer),) if wave == self._plan.waves - 1 else ()

    def _lent_room_is_free(self) -> tuple[Key, ...]:
        """The last step's lent state is gone."""
        return tuple(Key(Op.RETURN_STATE, layer) for layer in self._plan.device_updates)
