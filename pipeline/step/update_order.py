"""What follows on a layer's backward: its gradient leaves, its state comes, it is updated on the host or the device."""

from __future__ import annotations

from pipeline.step.graph import Graph, Resource
from pipeline.step.operations import Key, Op, Pass
from pipeline.step.streaming_order import StreamingOrder

UPDATES_AHEAD = 4
"""Updates on the host that are called before the first of them is done. All that wait for the norm would be sent when
it is known, a call to every optimizer for each layer, and hold up what the device waits for: of 36 layers, with four
optimizers on two cores, the next step's first layer began 43 to 48 ms after the backward, with this 21 to 22."""


class UpdateOrder:
    """Adds to a graph what gradients set in motion."""

    def __init__(self, graph: Graph, streaming: StreamingOrder, *, captures: bool = False) -> None:
        """Add to `graph`; `captures` says that the step before wrote a checkpoint."""
        self._graph = graph
        self._captures = captures
        self._plan = graph.plan
        self._streaming = streaming
        self._complete: dict[int, Key] = {}
        """By layer: the operation whose return completes its gradient."""
        self._updates: list[Key] = []
        """On the host, in their order."""
        self._staged_again: dict[int, Key] = {}
        """By layer that is updated on the device: the STAGE that put it back into its slot, where one had to."""

    def leave(self, layer: int, complete: Key) -> None:
        """What follows at once on the operation that completes a layer's gradient."""
        self._complete[layer] = complete
        if not self._plan.gradient_on_device(layer):
            self._offload(layer)
        if not self._plan.clip:
            self._update(layer, Key(Op.LOSS))
        if layer < self._plan.head:
            self._lend(layer)

    def after_norm(self) -> None:
        """What waits for the norm, in forward order: layer 0 is needed first."""
        for layer in range(self._plan.num_layers):
            if layer in self._plan.device_updates:
                self._update_on_device(layer)
                continue
            if self._plan.gradient_on_device(layer):
                self._offload(layer)
            self._update(layer, Key(Op.NORM))
        self._return_states()

    def snapshot(self) -> None:
        """Every layer to a checkpoint, in the order of their updates."""
        for layer in self._in_order():
            self._graph.add(Key(Op.SNAPSHOT, layer), after=(self._done(layer),))

    def capture(self, trigger: Key) -> None:
        """Every layer in RAM that the last step's checkpoint may still be reading, once `trigger` has returned.

        The later, the less there is to copy; it must be over when the updates begin.
        """
        for layer in self._in_order():
            if self._plan.state_slot(layer) is None:
                self._graph.add(Key(Op.CAPTURE, layer), after=(trigger,), after_last=(self._done(layer),))

    def _in_order(self) -> range:
        """The layers in the order of their updates."""
        layers = range(self._plan.num_layers)
        return layers if self._plan.clip else layers[::-1]

    def _done(self, layer: int) -> Key:
        """What leaves a layer's new state where snapshots find it."""
        if layer in self._plan.device_updates:
            return Key(Op.RETURN_STATE, layer)
        return Key(Op.UPDATE if self._plan.state_slot(layer) is None else Op.STORE_STATE, layer)

    def _captured(self, layer: int) -> tuple[Key, ...]:
        """What must have returned before a layer in RAM may change."""
        return (Key(Op.CAPTURE, layer),) if self._captures else ()

    def _offload(self, layer: int) -> None:
        self._graph.add(
            Key(Op.OFFLOAD, layer),
            after=(self._complete[layer],),
            takes=self._graph.gradient(layer),
            holds=(self._graph.outgoing(layer),),
        )

    def _update(self, layer: int, control: Key) -> None:
        after = [Key(Op.OFFLOAD, layer), control]
        ram_slot = self._plan.state_slot(layer)
        # Files are not captured: they change when the snapshot has copied them.
        after_last = () if ram_slot is None else (Key(Op.SNAPSHOT, layer),)
        if ram_slot is not None:
            state = (Resource("state", ram_slot),)
            self._graph.add(
                Key(Op.LOAD_STATE, layer), after_last=(Key(Op.STORE_STATE, layer), Key(Op.SNAPSHOT, layer)), takes=state
            )
            after.append(Key(Op.LOAD_STATE, layer))
        else:
            after += self._captured(layer)
        if len(self._updates) >= UPDATES_AHEAD:
            after.append(self._updates[-UPDATES_AHEAD])
        self._updates.append(
            self._graph.add(
                Key(Op.UPDATE, layer),
                after=tuple(after),
                after_last=after_last,
                holds=self._graph.gradient(layer),
            )
        )
        if ram_slot is not None:
            self._graph.add(Key(Op.STORE_STATE, layer), after=(Key(Op.UPDATE, layer),), holds=state)

    def _lend(self, below: int) -> None:
        """Lend the state of a layer once the backward of layer `below` is done.

        Spread over the last layers of the backward, two apart: the weights that these need cross the same link.
        """
        lent, head = self._plan.device_updates, self._plan.head
        room_is_free = min(head - self._plan.in_lent_room, head - 1)
        for rank, layer in enumerate(lent):
            if min(2 * (len(lent) - rank), room_is_free) != below:
                continue
            if layer == 0 and not self._plan.tied:
                # The head may have taken its place.
                self._staged_again[layer] = self._streaming.stage(layer, Pass.BACKWARD, self._plan.waves - 1)
            self._graph.add(
                Key(Op.LEND_STATE, layer),
                after=(self._complete[below],),
                after_last=(Key(Op.RETURN_STATE, layer),),
            )

    def _update_on_device(self, layer: int) -> None:
        staged = (self._staged_again[layer],) if layer in self._staged_again else ()
        self._graph.add(
            Key(Op.UPDATE_ON_DEVICE, layer),
            after=(self._complete[layer], Key(Op.NORM), Key(Op.LEND_STATE, layer), *staged),
            holds=(self._graph.outgoing(layer), self._graph.device(layer)),
        )

    def _return_states(self) -> None:
        """Decoder layers first: others wait for their slots, whereas the embedding's is free until the head comes.

        One after another, since the link would be shared or taken by whichever update ends first, the embedding's.
        """
        before: tuple[Key, ...] = ()
        for layer in sorted(self._plan.device_updates, key=lambda layer: (layer == 0, layer)):
            key = self._graph.add(
                Key(Op.RETURN_STATE, layer),
                after=(Key(Op.UPDATE_ON_DEVICE, layer), *before, *self._captured(layer)),
                holds=(self._graph.device(layer),),
            )
            before = (key,)
