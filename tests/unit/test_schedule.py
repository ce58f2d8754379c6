"""Walks the step graph in random legal orders: no slot is reused early and each update happens once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule import SchedulePlan, build_evaluation, build_snapshot, build_step
from pipeline.step.operations import Key, Op, Operation, Pass
from pipeline.step.update_order import UPDATES_AHEAD
from support.step_machine import make_plan, walk

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
        own=st.integers(0, 7),
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
        spanning=st.booleans(),
        kept=st.integers(0, 7),
        own=st.integers(0, 7),
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
        own=st.integers(0, 7),
        every=st.integers(1, 4),
        waves=st.integers(2, 4),
    )
    | st.builds(
        make_plan,
        decoders=st.integers(1, 7),
        tied=st.booleans(),
        on_device=st.integers(1, 4),
        kept=st.integers(0, 7),
        own=st.integers(0, 7),
        sharing=st.integers(0, 7),
        waves=st.integers(2, 3),
    )
)


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
    operations = build_step(plan, checkpoint=True, captures=True)
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


def test_a_layer_that_keeps_its_graph_is_streamed_again_for_its_backward_unless_it_has_a_slot_of_its_own() -> None:
    def staged_again(plan: SchedulePlan) -> list[int]:
        return [key.layer for key in keys_of(build_step(plan), Op.STAGE) if key.pass_ is Pass.BACKWARD]

    assert staged_again(make_plan(decoders=6, kept=6)) == [4, 3, 2, 1]
    own = make_plan(decoders=6, kept=6, own=2)
    assert [own.device_slot(layer) for layer in range(1, 7)] == [0, 1, 0, 1, 3, 2]
    assert staged_again(own) == [2, 1]
    assert staged_again(make_plan(decoders=6, kept=6, own=6)) == []


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


@pytest.mark.parametrize("clip", [False, True])
def test_a_few_updates_are_called_ahead_so_that_the_norm_does_not_send_them_all_at_once(clip: bool) -> None:
    operations = build_step(make_plan(decoders=8, on_device=2 if clip else 0, clip=clip))
    updates = [operation for operation in operations if operation.key.op is Op.UPDATE]
    for behind, update in zip(updates, updates[UPDATES_AHEAD:], strict=False):
        assert behind.key in update.after
    at_once = [update for update in updates if not any(key.op is Op.UPDATE for key in update.after)]
    assert at_once == updates[:UPDATES_AHEAD]


def test_an_update_waits_for_what_a_checkpoint_has_yet_to_read_of_its_layer_and_for_no_writing() -> None:
    plan = make_plan(decoders=6, on_device=2)
    operations = {operation.key: operation for operation in build_step(plan, captures=True)}
    for layer in range(plan.num_layers):
        change = Key(Op.RETURN_STATE if layer < 2 else Op.UPDATE, layer)
        assert Key(Op.CAPTURE, layer) in operations[change].after
        assert operations[Key(Op.CAPTURE, layer)].after_last == (change,)
        assert operations[Key(Op.CAPTURE, layer)].after == (Key(Op.BACKWARD, 3, Pass.BACKWARD),)
    waiting = {key.op for operation in operations.values() for key in (*operation.after, *operation.after_last)}
    assert Op.SNAPSHOT not in waiting
    assert not keys_of(build_step(plan, checkpoint=True), Op.CAPTURE)


def test_without_clipping_layers_are_captured_within_the_forward_the_last_one_first() -> None:
    captures = [op for op in build_step(make_plan(clip=False), captures=True) if op.key.op is Op.CAPTURE]
    assert [operation.key.layer for operation in captures] == [5, 4, 3, 2, 1, 0]
    assert {operation.after for operation in captures} == {(Key(Op.FORWARD, 2),)}


def test_files_are_not_captured_their_change_waits_for_the_copy() -> None:
    operations = {operation.key: operation for operation in build_step(make_plan(spilled="state"), captures=True)}
    assert sorted(key.layer for key in operations if key.op is Op.CAPTURE) == [0, 5]
    assert Key(Op.SNAPSHOT, 2) in operations[Key(Op.UPDATE, 2)].after_last


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
