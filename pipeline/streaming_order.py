"""The order in which layers pass the device: staged, gone through forward, recomputed, gone through backward."""

from __future__ import annotations

from pipeline.graph import Graph, Resource
from pipeline.operations import Key, Op, Pass


class StreamingOrder:
    """Adds to a graph what streams and computes; nothing that follows on a gradient."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._plan = graph.plan
        self._lies: dict[Resource, Key] = {}
        """By device slot: the STAGE of the layer that lies there."""
        self._weights_in_ram_slot: dict[int, int] = {}
        self._last_compute = Key(Op.BEGIN)

    def forward_pass(self) -> None:
        """Every layer forward; the head is staged and no more."""
        plan, graph = self._plan, self._graph
        graph.add(Key(Op.BEGIN))
        for layer in range(plan.num_layers):
            staged = self.stage(layer, Pass.FORWARD)
            if layer < plan.head:
                self._last_compute = graph.add(
                    Key(Op.FORWARD, layer),
                    after=(staged, self._last_compute),
                    after_last=self._lent_room_is_free() if layer == plan.head - plan.kept_in_lent_room else (),
                    holds=(graph.device(layer),),
                )

    def evaluate(self) -> None:
        """The loss alone, after a forward pass."""
        staged = self._lies[self._graph.device(self._plan.head)]
        self._graph.add(Key(Op.EVALUATE), after=(staged, self._last_compute))

    def head(self) -> Key:
        """Loss and backward of the head, after a forward pass."""
        graph, head = self._graph, self._plan.head
        self._last_compute = graph.add(
            Key(Op.HEAD),
            after=(self._lies[graph.device(head)], self._last_compute),
            takes=(graph.outgoing(head),),
            holds=(graph.device(head), graph.device(0)),
        )
        return self._last_compute

    def backward(self, layer: int) -> Key:
        """Backward of a layer, behind all that its group must make anew for it."""
        graph = self._graph
        for lower in self._plan.groups.made_again(layer):
            staged = self._staged(lower, Pass.RECOMPUTE)
            self._last_compute = graph.add(
                Key(Op.RECOMPUTE, lower, Pass.RECOMPUTE),
                after=(self._last_compute, *staged),
                holds=(graph.device(lower),),
            )
        # The embedding's backward needs no weights.
        staged = self._staged(layer, Pass.BACKWARD) if layer else ()
        self._last_compute = graph.add(
            Key(Op.BACKWARD, layer, Pass.BACKWARD),
            after=(self._last_compute, *staged),
            takes=(graph.outgoing(layer),),
            holds=(graph.device(layer),) if layer else (),
        )
        return self._last_compute

    def stage(self, layer: int, pass_: Pass) -> Key:
        """Bring a layer's weights to its slot."""
        plan, graph = self._plan, self._graph
        key = self._lies[graph.device(layer)] = Key(Op.STAGE, layer, pass_)
        if layer in plan.device_updates and pass_ is Pass.FORWARD:
            # It lies in its slot already, newer than in RAM; only an evaluation in between, which runs alone, makes
            # this a copy.
            return graph.add(key, after_last=(Key(Op.UPDATE_ON_DEVICE, layer),))
        after: tuple[Key, ...] = ()
        after_last: tuple[Key, ...] = (Key(Op.UPDATE, layer),) if pass_ is Pass.FORWARD else ()
        if layer in plan.device_updates:
            after_last += (Key(Op.RETURN_STATE, layer),)
        ram_slot = plan.weight_slot(layer)
        holds: tuple[Resource, ...] = ()
        if ram_slot is not None:
            holds = (Resource("weight", ram_slot),)
            if self._weights_in_ram_slot.get(ram_slot) != layer:
                self._weights_in_ram_slot[ram_slot] = layer
                stored = (Key(Op.STORE_STATE, layer),) if pass_ is Pass.FORWARD else ()
                after += (graph.add(Key(Op.LOAD_WEIGHTS, layer, pass_), after_last=stored, takes=holds),)
        takes: tuple[Resource, ...] = (graph.device(layer),)
        if layer == plan.head and not plan.tied:
            # It may lie in the embedding's memory.
            takes += (graph.device(0),)
        return graph.add(key, after=after, after_last=after_last, takes=takes, holds=holds)

    def _staged(self, layer: int, pass_: Pass) -> tuple[Key, ...]:
        """The STAGE to wait for, added here; none where the layer still lies in its slot."""
        lying = self._lies.get(self._graph.device(layer))
        return () if lying is not None and lying.layer == layer else (self.stage(layer, pass_),)

    def _lent_room_is_free(self) -> tuple[Key, ...]:
        """The last step's lent state is gone."""
        return tuple(Key(Op.RETURN_STATE, layer) for layer in self._plan.device_updates)
