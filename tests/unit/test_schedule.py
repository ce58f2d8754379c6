"""Walks the step graph in random legal orders: no slot is reused early and each update happens once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.operations import Key, Op, Operation, Pass
from pipeline.schedule import SchedulePlan, build_evaluation, build_snapshot, build_step
from tiers.layout import LayerKind


def make_plan(
    *,
    decoders: int = 4,
    tied: bool = False,
    clip: bool = True,
    decoder_slots: int = 2,
    spilled: str = "none",
    ring: int = 0,
    held: int = 0,
    on_device: int = 0,
    kept: int = 0,
    sharing: int = 0,
    every: int = 1,
    waves: int = 1,
) -> SchedulePlan:
    kinds = (LayerKind.EMBEDDING, *[LayerKind.DECODER] * decoders, LayerKind.HEAD)
    slots = tuple(None if kind is not LayerKind.DECODER else index % 2 for index, kind in enumerate(kinds))
    gradients = (
        tuple(decoders + index if kind is not LayerKind.DECODER else index % ring for index, kind in enumerate(kinds))
        if ring
        else ()
    )
    device_gradients = tuple(index >= len(kinds) - held for index in range(len(kinds)))
    if held:
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
        device_gradients=device_gradients,
        kept_layers=min(kept, decoders),
        boundary_every=every,
        waves=waves,
        kept_in_lent_room=min(sharing, kept, decoders),
        device_updates=tuple(range(min(on_device, decoder_slots + 1, decoders + 1))) if spilled == "none" else (),
    )


plans = (
    st.builds(
        make_plan,
        decoders=st.integers(1, 7),
        tied=st.booleans(),
        clip=st.just(True),
        decoder_slots=st.integers(1, 3),
        spilled=st.sampled_from(["none", "state", "weights"]),
        held=st.integers(0, 9),
        on_device=st.integers(0, 4),
        kept=st.integers(0, 7),
        sharing=st.integers(0, 7),
        every=st.integers(1, 4),
    )
    | st.builds(
        make_plan,
        decoders=st.integers(1, 7),
        tied=st.booleans(),
        clip=st.just(False),
        decoder_slots=st.integers(1, 3),
        spilled=st.sampled_from(["none", "state", "weights"]),
        ring=st.sampled_from([0, 2, 3]),
        kept=st.integers(0, 7),
        every=st.integers(1, 4),
    )
    | st.builds(
        make_plan,
        decoders=st.integers(1, 7),
        tied=st.booleans(),
        clip=st.booleans(),
        decoder_slots=st.integers(1, 3),
        spilled=st.sampled_from(["none", "state", "weights"]),
        kept=st.integers(0, 7),
        every=st.integers(1, 4),
        waves=st.integers(2, 4),
    )
    | st.builds(
        make_plan,
        decoders=st.integers(1, 7),
        tied=st.booleans(),
        on_device=st.integers(1, 4),
        kept=st.integers(0, 7),
        sharing=st.integers(0, 7),
        waves=st.integers(2, 3),
    )
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
        if key.op in (Op.FORWARD, Op.BACKWARD) and layer >= plan.head - plan.kept_in_lent_room:
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
                slot = plan.gradient_slot(layer)
                assert slot not in self.gradients, f"{key} overwrites {self.gradients[slot]}"
                self.gradients[slot] = (layer, step)
            case Op.STORE_SUM:
                assert self.sums[plan.accumulator(layer)] == (layer, step, key.wave + 1)
                self.sums[plan.accumulator(layer)] = None
                slot = plan.gradient_slot(layer)
                assert slot not in self.gradients, f"{key} overwrites {self.gradients[slot]}"
                self.ram_sums[slot] = (layer, step, key.wave + 1)
            case Op.FETCH_SUM:
                assert self.sums[plan.accumulator(layer)] is None, f"{key} overwrites a sum"
                self.sums[plan.accumulator(layer)] = self.ram_sums.pop(plan.gradient_slot(layer))
                assert self.sums[plan.accumulator(layer)] == (layer, step, key.wave)
            case Op.LOAD_STATE:
                assert self.on_disk[layer] == step
                self.ram_state[plan.state_slot(layer) or 0] = (layer, step)
            case Op.UPDATE:
                assert self.gradients.pop(plan.gradient_slot(layer)) == (layer, step)
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
                assert self.version[layer] == step + 1
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
        operations = build_step(plan, checkpoint=step == checkpoint_at)
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


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 2**32))
def test_any_legal_order_reads_the_right_bytes_and_updates_each_layer_once(plan: SchedulePlan, seed: int) -> None:
    machine = walk(plan, steps=3, checkpoint_at=1, rng=random.Random(seed))
    assert all(machine.version[layer] == 3 for layer in range(plan.num_layers))
    assert all(count == 3 for name, count in machine.log.items() if name.startswith("update"))
    assert sum(count for name, count in machine.log.items() if name.startswith("snapshot")) == plan.num_layers


@given(plan=plans)
def test_submission_order_follows_every_edge(plan: SchedulePlan) -> None:
    seen: set[Key] = set()
    operations = build_step(plan, checkpoint=True)
    for operation in operations:
        assert set(operation.after) <= seen, f"{operation.key} is submitted before what it waits for"
        assert operation.key not in seen
        seen.add(operation.key)
    for operation in operations:
        assert set(operation.after_last) <= seen


def keys_of(operations: tuple[Operation, ...], op: Op) -> list[Key]:
    return [operation.key for operation in operations if operation.key.op is op]


def test_weights_cross_once_forward_and_once_backward_and_not_again_where_they_still_lie() -> None:
    operations = build_step(make_plan(decoders=6))
    assert [key.layer for key in keys_of(operations, Op.STAGE) if key.pass_ is Pass.FORWARD] == list(range(8))
    assert [key.layer for key in keys_of(operations, Op.STAGE) if key.pass_ is Pass.BACKWARD] == [4, 3, 2, 1]


def test_a_layer_that_keeps_its_graph_is_streamed_once_into_a_slot_of_its_own() -> None:
    plan = make_plan(decoders=6, kept=2)
    operations = build_step(plan)
    assert [plan.device_slot(layer) for layer in range(1, 7)] == [0, 1, 0, 1, 3, 2]
    assert [key.layer for key in keys_of(operations, Op.STAGE) if key.pass_ is Pass.BACKWARD] == [2, 1]


def names_of(plan: SchedulePlan, *ops: Op) -> list[str]:
    return [str(operation.key) for operation in build_step(plan) if operation.key.op in ops]


def test_a_group_of_layers_is_made_again_from_its_kept_input_and_its_weights_cross_once_for_both() -> None:
    plan = make_plan(decoders=8, decoder_slots=4, every=3)
    assert [layer for layer in range(1, 9) if plan.groups.keeps_input(layer)] == [1, 4, 7, 8]
    assert names_of(plan, Op.RECOMPUTE, Op.BACKWARD)[:7] == [
        *("backward[8]", "backward[7]", "recompute[4]", "recompute[5]", "backward[6]", "backward[5]", "backward[4]")
    ]
    # Layers 5 to 8 still lie in the four slots when the backward begins.
    assert names_of(plan, Op.STAGE)[10:] == ["restage[4]", "restage[1]", "restage[2]", "restage[3]"]


def test_a_group_larger_than_the_slots_streams_again_what_was_overwritten_and_no_more() -> None:
    plan = make_plan(decoders=8, decoder_slots=2, every=4)
    assert names_of(plan, Op.STAGE)[10:] == [
        *(
            "restage[6]",
            "restage[5]",
            "restage[1]",
            "restage[2]",
            "restage[3]",
            "restage[4]",
            "restage[2]",
            "restage[1]",
        )
    ]


def test_a_wave_goes_on_with_the_sums_of_the_one_before_and_the_last_lets_gradients_leave() -> None:
    names = [str(operation.key) for operation in build_step(make_plan(decoders=3, waves=2))]
    assert [name for name in names if "head" in name or "backward" in name] == [
        *("head", "backward[3]", "backward[2]", "backward[1]"),
        *("head wave 2", "backward[3] wave 2", "backward[2] wave 2", "backward[1] wave 2", "backward[0] wave 2"),
    ]
    for layer in (1, 2, 3):
        wanted = [f"store_sum[{layer}]", f"fetch_sum[{layer}] wave 2", f"backward[{layer}] wave 2", f"offload[{layer}]"]
        assert [name for name in names if name in wanted] == wanted
    # What still lies on the device when a wave ends is not streamed again for the next; the head took the embedding.
    assert [name for name in names if name.startswith("stage") and name.endswith("wave 2")] == [
        *("stage[0] wave 2", "stage[3] wave 2", "stage[4] wave 2")
    ]


def test_a_gradient_on_the_device_leaves_between_the_norm_and_its_update() -> None:
    names = [str(operation.key) for operation in build_step(make_plan(held=3))]
    for layer in (3, 4, 5):
        assert names.index("norm") < names.index(f"offload[{layer}]") == names.index(f"update[{layer}]") - 1
    assert names.index("offload[2]") < names.index("norm")


def test_layers_that_the_next_step_reads_first_are_updated_where_they_lie() -> None:
    operations = {operation.key: operation for operation in build_step(make_plan(decoders=6, on_device=3))}
    for layer in range(3):
        assert Key(Op.UPDATE, layer) not in operations and Key(Op.OFFLOAD, layer) not in operations
        assert operations[Key(Op.STAGE, layer)].after_last == (Key(Op.UPDATE_ON_DEVICE, layer),)
        assert Key(Op.NORM) in operations[Key(Op.UPDATE_ON_DEVICE, layer)].after
    # The slot of layer 1 is free once its new weights have left; nothing of the next forward waits for the embedding.
    assert Key(Op.RETURN_STATE, 1) in operations[Key(Op.STAGE, 3)].after_last
    assert Key(Op.RETURN_STATE, 2) in operations[Key(Op.RETURN_STATE, 0)].after
    assert not any(
        Key(Op.RETURN_STATE, 0) in operation.after_last
        for key, operation in operations.items()
        if key.op in (Op.STAGE, Op.FORWARD) and key.layer < 7 and key.pass_ is Pass.FORWARD
    )


def test_updates_run_in_forward_order_behind_the_norm_with_clipping_and_as_gradients_arrive_without() -> None:
    clipped, immediate = build_step(make_plan(clip=True)), build_step(make_plan(clip=False))
    assert [key.layer for key in keys_of(clipped, Op.UPDATE)] == [0, 1, 2, 3, 4, 5]
    assert [key.layer for key in keys_of(immediate, Op.UPDATE)] == [5, 4, 3, 2, 1, 0]
    by_key = {operation.key: operation for operation in clipped}
    assert Key(Op.NORM) in by_key[Key(Op.UPDATE, 3)].after
    by_key = {operation.key: operation for operation in immediate}
    assert Key(Op.NORM) not in by_key[Key(Op.UPDATE, 3)].after


def test_operations_are_named_as_a_reader_of_the_timeline_expects() -> None:
    assert str(Key(Op.FORWARD, 17)) == "forward[17]"
    assert str(Key(Op.BACKWARD, 17, Pass.BACKWARD)) == "backward[17]"
    assert str(Key(Op.STAGE, 17, Pass.BACKWARD)) == "restage[17]"
    assert str(Key(Op.RECOMPUTE, 17, Pass.RECOMPUTE)) == "recompute[17]"
    assert str(Key(Op.NORM)) == "norm"


@pytest.mark.parametrize("spilled", ["none", "weights"])
def test_an_evaluation_only_reads(spilled: str) -> None:
    operations = build_evaluation(make_plan(spilled=spilled))
    written = {Op.UPDATE, Op.STORE_STATE, Op.BACKWARD, Op.OFFLOAD, Op.SNAPSHOT, Op.HEAD}
    assert not {operation.key.op for operation in operations} & written
    assert operations[-1].key == Key(Op.EVALUATE)
    assert len(build_snapshot(make_plan())) == 6
