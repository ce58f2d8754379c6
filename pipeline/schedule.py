"""The one place that knows the order of a training step: a pure function from a plan to a graph of operations.

`coordinator` submits the graph as Ray calls, `simulate` prices it, tests walk it. An edge means "may start once that
call has returned"; device work behind a returned call is ordered on the device by streams and events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeline.operations import EMBEDDING_SLOT, HEAD_SLOT, Key, Op, Operation, Pass
from tiers.layout import LayerKind


@dataclass(frozen=True)
class SchedulePlan:
    """What the order of a step depends on."""

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
    """By layer: gradient slot in RAM; empty means one of its own for every layer."""
    device_gradients: tuple[bool, ...] = ()
    """By layer: whether the gradient waits for the norm in a device buffer of its own; empty means none does. Only
    with clipping."""
    device_updates: tuple[int, ...] = ()
    """Layers that are updated on the device, ascending: of those that lie in a device slot when a step ends (the
    embedding, the first decoder layers) and are at home in RAM. Only with clipping, where the next forward would wait
    for them."""
    kept_layers: int = 0
    """Decoder layers, the last ones, that keep weights and graph on the device from forward to backward: slots of
    their own, no second streaming, no recompute."""
    kept_in_lent_room: int = 0
    """Of the kept layers, the last ones whose graphs use the memory of lent state before it comes and after it has
    gone."""

    @property
    def num_layers(self) -> int:
        """Embedding and head included."""
        return len(self.kinds)

    @property
    def head(self) -> int:
        """Index of the head layer, the last."""
        return len(self.kinds) - 1

    def device_slot(self, layer: int) -> int:
        """Device slot that holds `layer` while it is at work."""
        if self.kinds[layer] is LayerKind.DECODER:
            if layer >= self.head - self.kept_layers:
                return self.decoder_slots + self.head - 1 - layer
            return (layer - 1) % self.decoder_slots
        return EMBEDDING_SLOT if layer == 0 else HEAD_SLOT

    def weight_slot(self, layer: int) -> int | None:
        """RAM slot that stages the layer's weights from NVMe, or None."""
        return self.weight_slots[layer] if self.weight_slots else None

    def state_slot(self, layer: int) -> int | None:
        """RAM slot that stages the layer's optimizer state from NVMe, or None."""
        return self.state_slots[layer] if self.state_slots else None

    def gradient_slot(self, layer: int) -> int:
        """RAM slot that holds the layer's gradient from `offload` to `update`."""
        return self.gradient_slots[layer] if self.gradient_slots else layer

    def gradient_on_device(self, layer: int) -> bool:
        """Whether the layer's gradient stays on the device until the norm, beyond the end of its backward."""
        return layer in self.device_updates or (bool(self.device_gradients) and self.device_gradients[layer])


def build_step(plan: SchedulePlan, *, checkpoint: bool = False) -> tuple[Operation, ...]:
    """Build one training step, in an order of submission in which every operation follows those it waits for.

    Args:
        plan: Placement and clipping.
        checkpoint: Whether every layer is written to a checkpoint after its update.
    """
    # What a slot's first user in a step waits for is the slot's last user in the step before: build once to learn it.
    carried = _StepBuilder(plan, {}).build(checkpoint).holders
    return tuple(_StepBuilder(plan, carried).build(checkpoint).operations)


def build_snapshot(plan: SchedulePlan) -> tuple[Operation, ...]:
    """Build the writing of a checkpoint between steps. It runs alone, like an evaluation."""
    return tuple(Operation(Key(Op.SNAPSHOT, layer)) for layer in range(plan.num_layers))


def build_evaluation(plan: SchedulePlan) -> tuple[Operation, ...]:
    """Build a pass that only measures the loss. It runs alone: nothing of a training step may be in flight."""
    builder = _StepBuilder(plan, {})
    builder.forward_pass()
    builder.add(Key(Op.EVALUATE), after=(Key(Op.STAGE, plan.head), Key(Op.FORWARD, plan.head - 1)))
    return tuple(builder.operations)


class _Resource(NamedTuple):
    """Memory that several layers use in turn."""

    kind: str
    slot: int


class _StepBuilder:
    """Appends operations and remembers who used each slot last, so that the next user waits for it."""

    def __init__(self, plan: SchedulePlan, carried: dict[_Resource, Key]) -> None:
        self.plan = plan
        self.carried = carried
        self.holders: dict[_Resource, Key] = {}
        self.operations: list[Operation] = []
        self._taken: set[_Resource] = set()
        """What an operation of this step has overwritten: its holders of the step before are done."""
        self._weights_in_ram_slot: dict[int, int] = {}

    def build(self, checkpoint: bool) -> _StepBuilder:
        self.forward_pass()
        self.add(
            Key(Op.HEAD),
            after=(Key(Op.STAGE, self.plan.head), Key(Op.FORWARD, self.plan.head - 1)),
            takes=(self._outgoing(self.plan.head),),
            holds=(self._device(self.plan.head), self._device(0)),
        )
        if not self.plan.clip:
            self.add(Key(Op.LOSS), after=(Key(Op.HEAD),), after_last=(Key(Op.LOSS),))
        self.leave(self.plan.head)
        for layer in range(self.plan.head - 1, -1, -1):
            self.backward(layer)
            self.leave(layer)
            self.lend(layer)
        self.add(
            Key(Op.NORM), after=(_backward(0), *(() if self.plan.clip else (Key(Op.LOSS),))), after_last=(Key(Op.NORM),)
        )
        if self.plan.clip:
            for layer in range(self.plan.num_layers):
                if layer in self.plan.device_updates:
                    self.update_on_device(layer)
                    continue
                if self.plan.gradient_on_device(layer):
                    self.offload(layer)
                self.update(layer, Key(Op.NORM))
        self.return_states()
        if checkpoint:
            for layer in self.update_order():
                done = Op.UPDATE if self.plan.state_slot(layer) is None else Op.STORE_STATE
                done = Op.RETURN_STATE if layer in self.plan.device_updates else done
                self.add(Key(Op.SNAPSHOT, layer), after=(Key(done, layer),))
        return self

    def update_order(self) -> range:
        """Forward order with clipping (layer 0 is needed first), else as gradients arrive."""
        layers = range(self.plan.num_layers)
        return layers if self.plan.clip else layers[::-1]

    def forward_pass(self) -> None:
        self.add(Key(Op.BEGIN))
        for layer in range(self.plan.num_layers):
            self.stage(layer, Pass.FORWARD)
            if layer < self.plan.head:
                before = Key(Op.FORWARD, layer - 1) if layer else Key(Op.BEGIN)
                self.add(
                    Key(Op.FORWARD, layer),
                    after=(Key(Op.STAGE, layer), before),
                    after_last=self._returned() if layer == self.plan.head - self.plan.kept_in_lent_room else (),
                    holds=(self._device(layer),),
                )

    def backward(self, layer: int) -> None:
        above = Key(Op.HEAD) if layer == self.plan.head - 1 else _backward(layer + 1)
        after = [above]
        # The last decoder layers of the forward pass still lie in their slots, and the embedding's backward needs no
        # weights: neither is streamed again.
        if 0 < layer < self.plan.head - self.plan.kept_layers - self.plan.decoder_slots:
            self.stage(layer, Pass.BACKWARD)
            after.append(Key(Op.STAGE, layer, Pass.BACKWARD))
        self.add(
            _backward(layer),
            after=tuple(after),
            takes=(self._outgoing(layer),),
            holds=(self._device(layer),) if layer else (),
        )

    def stage(self, layer: int, pass_: Pass) -> None:
        if layer in self.plan.device_updates and pass_ is Pass.FORWARD:
            # It lies in its slot already, newer than in RAM; only an evaluation in between, which runs alone, makes
            # this a copy.
            self.add(Key(Op.STAGE, layer, pass_), after_last=(Key(Op.UPDATE_ON_DEVICE, layer),))
            return
        after, after_last = [], [Key(Op.UPDATE, layer)] if pass_ is Pass.FORWARD else []
        if layer in self.plan.device_updates:
            after_last.append(Key(Op.RETURN_STATE, layer))
        ram_slot = self.plan.weight_slot(layer)
        holds: tuple[_Resource, ...] = ()
        if ram_slot is not None:
            holds = (_Resource("weight", ram_slot),)
            if self._weights_in_ram_slot.get(ram_slot) != layer:
                self._weights_in_ram_slot[ram_slot] = layer
                stored = (Key(Op.STORE_STATE, layer),) if pass_ is Pass.FORWARD else ()
                self.add(Key(Op.LOAD_WEIGHTS, layer, pass_), after_last=stored, takes=holds)
                after.append(Key(Op.LOAD_WEIGHTS, layer, pass_))
        # An untied head may lie in the embedding's memory.
        takes = (
            (self._device(layer), self._device(0))
            if layer == self.plan.head and not self.plan.tied
            else (self._device(layer),)
        )
        self.add(
            Key(Op.STAGE, layer, pass_), after=tuple(after), after_last=tuple(after_last), takes=takes, holds=holds
        )

    def leave(self, layer: int) -> None:
        """What follows on a layer's backward."""
        if not self.plan.gradient_on_device(layer):
            self.offload(layer)
        if not self.plan.clip:
            self.update(layer, Key(Op.LOSS))

    def offload(self, layer: int) -> None:
        done = Key(Op.HEAD) if layer == self.plan.head else _backward(layer)
        gradient = _Resource("gradient", self.plan.gradient_slot(layer))
        self.add(Key(Op.OFFLOAD, layer), after=(done,), takes=(gradient,), holds=(self._outgoing(layer),))

    def update(self, layer: int, control: Key) -> None:
        after = [Key(Op.OFFLOAD, layer), control]
        ram_slot = self.plan.state_slot(layer)
        if ram_slot is not None:
            state = (_Resource("state", ram_slot),)
            self.add(
                Key(Op.LOAD_STATE, layer), after_last=(Key(Op.STORE_STATE, layer), Key(Op.SNAPSHOT, layer)), takes=state
            )
            after.append(Key(Op.LOAD_STATE, layer))
        self.add(
            Key(Op.UPDATE, layer),
            after=tuple(after),
            after_last=(Key(Op.SNAPSHOT, layer),),
            holds=(_Resource("gradient", self.plan.gradient_slot(layer)),),
        )
        if ram_slot is not None:
            self.add(Key(Op.STORE_STATE, layer), after=(Key(Op.UPDATE, layer),), holds=state)

    def lend(self, below: int) -> None:
        """Lend the state of a layer once the backward of layer `below` is done.

        Spread over the last layers of the backward, two apart: the weights that these need cross the same link.
        """
        lent = self.plan.device_updates
        for rank, layer in enumerate(lent):
            room_is_free = min(self.plan.head - self.plan.kept_in_lent_room, self.plan.head - 1)
            if min(2 * (len(lent) - rank), room_is_free) != below:
                continue
            after = (_backward(below),)
            if layer == 0 and not self.plan.tied:
                # The head may have taken its place.
                self.stage(layer, Pass.BACKWARD)
            self.add(Key(Op.LEND_STATE, layer), after=after, after_last=(Key(Op.RETURN_STATE, layer),))

    def _returned(self) -> tuple[Key, ...]:
        """The last step's lent state is gone."""
        return tuple(Key(Op.RETURN_STATE, layer) for layer in self.plan.device_updates)

    def update_on_device(self, layer: int) -> None:
        staged = (Key(Op.STAGE, layer, Pass.BACKWARD),) if layer == 0 and not self.plan.tied else ()
        self.add(
            Key(Op.UPDATE_ON_DEVICE, layer),
            after=(_backward(layer), Key(Op.NORM), Key(Op.LEND_STATE, layer), *staged),
            holds=(self._outgoing(layer), self._device(layer)),
        )

    def return_states(self) -> None:
        """Decoder layers first: others wait for their slots, whereas the embedding's is free until the head comes.

        One after another, since the link would be shared or taken by whichever update ends first, the embedding's.
        """
        lent = self.plan.device_updates
        before: tuple[Key, ...] = ()
        for layer in sorted(lent, key=lambda layer: (layer == 0, layer)):
            key = Key(Op.RETURN_STATE, layer)
            self.add(
                key,
                after=(Key(Op.UPDATE_ON_DEVICE, layer), *before),
                after_last=(Key(Op.SNAPSHOT, layer),),
                holds=(self._device(layer),),
            )
            before = (key,)

    def add(
        self,
        key: Key,
        *,
        after: tuple[Key, ...] = (),
        after_last: tuple[Key, ...] = (),
        takes: tuple[_Resource, ...] = (),
        holds: tuple[_Resource, ...] = (),
    ) -> None:
        """Append an operation that overwrites `takes` and whose return frees `holds`."""
        for resource in takes:
            if resource in self.holders:
                after = (*after, self.holders[resource])
            if resource in self.carried and resource not in self._taken:
                after_last = (*after_last, self.carried[resource])
            self._taken.add(resource)
        slot = self.plan.device_slot(key.layer) if key.layer >= 0 else HEAD_SLOT
        self.operations.append(Operation(key, _unique(after), _unique(after_last), slot))
        self.holders.update(dict.fromkeys(holds, key))

    def _device(self, layer: int) -> _Resource:
        return _Resource("device", self.plan.device_slot(layer))

    def _outgoing(self, layer: int) -> _Resource:
        if self.plan.gradient_on_device(layer):
            return _Resource("held gradient", layer)
        return _Resource("outgoing", (self.plan.head - layer) % self.plan.outgoing_buffers)


def _backward(layer: int) -> Key:
    return Key(Op.BACKWARD, layer, Pass.BACKWARD)


def _unique(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    return tuple(dict.fromkeys(keys))
