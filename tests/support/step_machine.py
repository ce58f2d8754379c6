"""A machine of slots and buffers that walks step graphs: every operation checks what it reads and overwrites."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from pipeline.schedule import SchedulePlan, build_step
from pipeline.step.operations import Key, Op
from tiers.layout import LayerKind


def make_plan(
    *,
    decoders: int = 4,
    tied: bool = False,
    clip: bool = True,
    decoder_slots: int = 2,
    spilled: str = "none",
    ring: int = 0,
    spanning: bool = False,
    held: int = 0,
    on_device: int = 0,
    kept: int = 0,
    own: int = 0,
    sharing: int = 0,
    every: int = 1,
    waves: int = 1,
) -> SchedulePlan:
    kinds = (LayerKind.EMBEDDING, *[LayerKind.DECODER] * decoders, LayerKind.HEAD)
    slots = tuple(None if kind is not LayerKind.DECODER else index % 2 for index, kind in enumerate(kinds))
    gradients, spans = (), ()
    if ring:
        large = [kind is not LayerKind.DECODER for kind in kinds]
        apart = 0 if spanning else decoders
        gradients = tuple(
            apart + index * (not spanning) if large[index] else index % ring for index in range(len(kinds))
        )
        spans = tuple(ring if spanning and each else 1 for each in large)
    device_gradients = tuple(index >= len(kinds) - held for index in range(len(kinds)))
    if held:
        spans = ()
        gradients = tuple(
            len(kinds) + index % 3 if on_device else index for index, on_device in enumerate(device_gradients)
        )
    return SchedulePlan(
        kinds=kinds,
        tied=tied,
        clip=clip,
        decoder_slots=decoder_slots,
        weight_slots=slots if spilled == "weights" else (),
        state_slots=slots if spilled != "none" else (),
        gradient_slots=gradients,
        gradient_spans=spans,
        device_gradients=device_gradients,
        kept_layers=min(kept, decoders),
        own_slots=min(own, decoders),
        boundary_every=every,
        waves=waves,
        in_lent_room=min(sharing, decoders),
        device_updates=tuple(range(min(on_device, decoder_slots + 1, decoders + 1))) if spilled == "none" else (),
    )


@dataclass
class Machine:
    """What the slots and the layers hold; every operation checks what it reads. Operations take effect on return."""

    plan: SchedulePlan
    device: dict[int, tuple[int, int]] = field(default_factory=dict)
    ram_weights: dict[int, tuple[int, int]] = field(default_factory=dict)
    ram_state: dict[int, tuple[int, int]] = field(default_factory=dict)
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    outgoing: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    version: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By layer: updates applied, as the arena has it."""
    lent: dict[int, int] = field(default_factory=dict)
    sharing_graphs: set[int] = field(default_factory=set)
    """Layers whose graphs lie where lent state does at other times."""
    on_disk: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    inputs: dict[int, int] = field(default_factory=dict)
    """By layer whose input is on the device: the step."""
    sums: dict[int, tuple[int, int, int] | None] = field(default_factory=dict)
    """By accumulator: layer, step and number of waves that are summed in it; None once it may be used anew."""
    ram_sums: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    """Layers whose snapshot has been taken and not captured."""
    captured: dict[int, int] = field(default_factory=dict)
    """By layer whose snapshot goes on from a copy: updates applied to it."""
    log: Counter[str] = field(default_factory=Counter)

    def device_key(self, layer: int) -> int:
        """An untied head shares the embedding's memory, which is the harder case."""
        slot = self.plan.device_slot(layer)
        return -1 if slot < 0 and not self.plan.tied else slot

    def outgoing_key(self, layer: int) -> int:
        """The buffer that a layer's gradient leaves through; those that are held have their own."""
        if self.plan.gradient_on_device(layer):
            return self.plan.outgoing_buffers + layer
        return (self.plan.head - layer) % self.plan.outgoing_buffers

    def run(self, step: int, key: Key) -> None:
        layer, plan = key.layer, self.plan
        self.log[f"{key}"] += 1
        if key.op in (Op.FORWARD, Op.BACKWARD) and layer >= plan.head - plan.in_lent_room:
            assert not self.lent, f"{key} of step {step} in the room of lent state"
            (self.sharing_graphs.add if key.op is Op.FORWARD else self.sharing_graphs.remove)(layer)
        match key.op:
            case Op.LOAD_WEIGHTS:
                self.ram_weights[plan.weight_slot(layer) or 0] = (layer, self.on_disk[layer])
            case Op.STAGE if layer in plan.device_updates and self.device.get(self.device_key(layer)) == (layer, step):
                pass
            case Op.STAGE:
                if plan.weight_slot(layer) is None:
                    content = (layer, self.version[layer])
                else:
                    content = self.ram_weights[plan.weight_slot(layer) or 0]
                assert content == (layer, step), f"{key} of step {step} streams {content}"
                self.device[self.device_key(layer)] = content
            case Op.FORWARD | Op.RECOMPUTE | Op.BACKWARD if layer > 0 or key.op is Op.FORWARD:
                assert self.device[self.device_key(layer)] == (layer, step), f"{key} of step {step}"
                assert layer == 0 or self.inputs[layer] == step, f"{key} of step {step} has no input"
                if key.op is Op.BACKWARD or (key.op is Op.FORWARD and not plan.groups.keeps_input(layer)):
                    self.inputs.pop(layer, None)
                if key.op is not Op.BACKWARD:
                    assert layer + 1 not in self.inputs
                    self.inputs[layer + 1] = step
            case Op.HEAD:
                assert self.inputs.pop(plan.head) == step
                layer = plan.head
                assert self.device[self.device_key(layer)] == (layer, step)
                if plan.tied:
                    assert self.device[self.device_key(0)] == (0, step)
            case Op.OFFLOAD:
                buffer = self.outgoing_key(layer)
                assert self.outgoing[buffer] == (layer, step)
                self.outgoing[buffer] = None
                for slot in plan.ram_gradient(layer):
                    assert slot not in self.gradients, f"{key} overwrites {self.gradients[slot]}"
                    self.gradients[slot] = (layer, step)
            case Op.STORE_SUM:
                assert self.sums[plan.accumulator(layer)] == (layer, step, key.wave + 1)
                self.sums[plan.accumulator(layer)] = None
                (slot,) = plan.ram_gradient(layer)
                assert slot not in self.gradients, f"{key} overwrites {self.gradients[slot]}"
                self.ram_sums[slot] = (layer, step, key.wave + 1)
            case Op.FETCH_SUM:
                assert self.sums[plan.accumulator(layer)] is None, f"{key} overwrites a sum"
                self.sums[plan.accumulator(layer)] = self.ram_sums.pop(plan.ram_gradient(layer)[0])
                assert self.sums[plan.accumulator(layer)] == (layer, step, key.wave)
            case Op.LOAD_STATE:
                assert self.on_disk[layer] == step
                self.ram_state[plan.state_slot(layer) or 0] = (layer, step)
            case Op.UPDATE:
                assert all(self.gradients.pop(slot) == (layer, step) for slot in plan.ram_gradient(layer))
                assert self.version[layer] == step
                self.version[layer] += 1
                if plan.state_slot(layer) is not None:
                    assert self.ram_state[plan.state_slot(layer) or 0] == (layer, step)
            case Op.LEND_STATE:
                assert self.version[layer] == step
                assert not self.sharing_graphs, f"{key} of step {step} in the room of kept graphs"
                self.lent[layer] = step
            case Op.UPDATE_ON_DEVICE:
                assert self.lent[layer] == step
                assert self.device[self.device_key(layer)] == (layer, step)
                assert self.outgoing[self.outgoing_key(layer)] == (layer, step)
                self.outgoing[self.outgoing_key(layer)] = None
                self.device[self.device_key(layer)] = (layer, step + 1)
            case Op.RETURN_STATE:
                assert self.device[self.device_key(layer)] == (layer, step + 1)
                del self.lent[layer]
                self.version[layer] += 1
            case Op.STORE_STATE:
                assert self.ram_state[plan.state_slot(layer) or 0] == (layer, step)
                self.on_disk[layer] = step + 1
            case Op.SNAPSHOT:
                assert self.captured.pop(layer, self.version[layer]) == step + 1
                self.written.add(layer)
            case Op.CAPTURE:
                assert plan.state_slot(layer) is None
                if layer not in self.written:
                    self.captured[layer] = self.version[layer]
        if key.op in (Op.BACKWARD, Op.HEAD):
            layer = plan.head if key.op is Op.HEAD else layer
            self.sum_gradient(step, layer, key.wave)
            if key.wave < plan.waves - 1:
                return
            buffer = self.outgoing_key(layer)
            assert self.outgoing.get(buffer) is None, f"{key} overwrites a gradient that has not left"
            self.outgoing[buffer] = (layer, step)

    def sum_gradient(self, step: int, layer: int, wave: int) -> None:
        """A wave's gradient comes upon the sum of those before; the embedding has all of its gradient at once."""
        plan, accumulator = self.plan, self.plan.accumulator(layer)
        before = self.sums.get(accumulator)
        assert before == ((layer, step, wave) if wave and layer else None), f"layer {layer} in wave {wave}: {before}"
        complete = layer == 0 or wave == plan.waves - 1
        self.sums[accumulator] = None if complete else (layer, step, wave + 1)


def walk(plan: SchedulePlan, steps: int, checkpoint_at: int, rng: random.Random) -> Machine:
    """Run `steps` steps, all submitted ahead, in a random order that the edges allow."""
    machine = Machine(plan)
    waiting: dict[tuple[int, Key], set[tuple[int, Key]]] = {}
    last: set[Key] = set()
    for step in range(steps):
        operations = build_step(plan, checkpoint=step == checkpoint_at, captures=step == checkpoint_at + 1)
        for operation in operations:
            waiting[step, operation.key] = {(step, key) for key in operation.after} | {
                (step - 1, key) for key in operation.after_last if key in last
            }
        last = {operation.key for operation in operations}
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs]
        assert ready, f"nothing can start: {list(waiting.items())[:3]}"
        step, key = rng.choice(ready)
        machine.run(step, key)
        del waiting[step, key]
        for needs in waiting.values():
            needs.discard((step, key))
    return machine
