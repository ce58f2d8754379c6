"""The residency table against any sequence of moves, and the moves that would lose or misread bytes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiers.arena_map import LayerHome
from tiers.errors import TierError
from tiers.residency import Move, Part, Residency, ResidencyTable

NVME = LayerHome(weight_slot=0, state_slot=0)


def table_after(*moves: tuple[int, Part, Move], layers: int = 2) -> ResidencyTable:
    table = ResidencyTable([NVME] * layers)
    for move in moves:
        table.move(*move)
    return table


def snapshot(table: ResidencyTable, layers: int) -> list[tuple[Residency, Residency]]:
    """Where the weights and the state of each layer are."""
    return [(table.residency(layer, Part.WEIGHTS), table.residency(layer, Part.STATE)) for layer in range(layers)]


def test_layers_start_where_they_live() -> None:
    table = ResidencyTable([LayerHome(), LayerHome(state_slot=1), NVME])
    assert snapshot(table, 3) == [
        (Residency.RESIDENT, Residency.RESIDENT),
        (Residency.RESIDENT, Residency.ON_DISK),
        (Residency.ON_DISK, Residency.ON_DISK),
    ]


def test_a_step_of_a_layer_on_nvme() -> None:
    table = ResidencyTable([NVME, NVME])
    for layer in (0, 1):
        for part, moves in {
            Part.WEIGHTS: (Move.BEGIN_LOAD, Move.END_LOAD, Move.EVICT),
            Part.STATE: (
                Move.BEGIN_LOAD,
                Move.END_LOAD,
                Move.UPDATE,
                Move.BEGIN_STORE,
                Move.END_STORE,
                Move.EVICT,
            ),
        }.items():
            for move in moves:
                table.move(layer, part, move)
    assert {state for _, state in snapshot(table, 2)} == {Residency.ON_DISK}


def test_an_update_is_not_evicted_before_it_is_stored() -> None:
    table = table_after((0, Part.STATE, Move.FILL))
    with pytest.raises(TierError, match="cannot evict the state of layer 0, which is dirty: possible are update"):
        table.move(0, Part.STATE, Move.EVICT)


def test_a_failed_store_keeps_the_update() -> None:
    table = table_after((0, Part.STATE, Move.FILL), (0, Part.STATE, Move.BEGIN_STORE))
    assert table.move(0, Part.STATE, Move.FAIL_STORE) is Residency.DIRTY


def test_a_slot_holds_one_layer() -> None:
    table = table_after((0, Part.WEIGHTS, Move.BEGIN_LOAD))
    assert table.holder(Part.WEIGHTS, 0) == 0
    with pytest.raises(TierError, match="slot 0 still holds layer 0, which is loading"):
        table.move(1, Part.WEIGHTS, Move.BEGIN_LOAD)
    table.move(0, Part.WEIGHTS, Move.FAIL_LOAD)
    table.move(1, Part.WEIGHTS, Move.BEGIN_LOAD)
    assert table.holder(Part.WEIGHTS, 0) == 1


@pytest.mark.parametrize("moves", [(Move.FILL,), (Move.FILL, Move.BEGIN_STORE)])
def test_weights_are_not_read_from_a_shard_that_an_update_has_overtaken(moves: tuple[Move, ...]) -> None:
    table = table_after(*((0, Part.STATE, move) for move in moves))
    with pytest.raises(TierError, match="out of date"):
        table.move(0, Part.WEIGHTS, Move.BEGIN_LOAD)


def test_an_update_drops_the_stale_streaming_copy() -> None:
    table = table_after(
        (0, Part.STATE, Move.BEGIN_LOAD),
        (0, Part.STATE, Move.END_LOAD),
        (0, Part.WEIGHTS, Move.BEGIN_LOAD),
    )
    with pytest.raises(TierError, match="stale on arrival"):
        table.move(0, Part.STATE, Move.UPDATE)
    table.move(0, Part.WEIGHTS, Move.END_LOAD)
    table.move(0, Part.STATE, Move.UPDATE)
    assert table.residency(0, Part.WEIGHTS) is Residency.ON_DISK
    assert table.holder(Part.WEIGHTS, 0) is None


def test_streaming_slots_are_read_only() -> None:
    with pytest.raises(TierError, match="only read"):
        table_after().move(0, Part.WEIGHTS, Move.FILL)


def test_what_lives_in_ram_never_moves() -> None:
    table = ResidencyTable([LayerHome()])
    for part in Part:
        for move in Move:
            with pytest.raises(TierError, match="lives in RAM"):
                table.move(0, part, move)


def test_streamed_weights_make_room_once_they_have_come() -> None:
    table = table_after((0, Part.WEIGHTS, Move.BEGIN_LOAD))
    table.make_room(1)
    assert table.holder(Part.WEIGHTS, 0) == 0
    table.move(0, Part.WEIGHTS, Move.END_LOAD)
    table.make_room(1)
    assert table.holder(Part.WEIGHTS, 0) is None
    table.make_room(1)
    table.move(1, Part.WEIGHTS, Move.BEGIN_LOAD)


class AnyMoves(RuleBasedStateMachine):
    """Plays any moves against bytes that really are somewhere: versions of shards, slots and updates."""

    @initialize(
        homes=st.lists(
            st.one_of(
                st.just(LayerHome()),
                st.builds(LayerHome, st.none(), st.integers(0, 1)),
                st.builds(LayerHome, st.integers(0, 1), st.integers(0, 1)),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def start(self, homes: list[LayerHome]) -> None:
        self.homes = homes
        self.table = ResidencyTable(homes)
        self.truth = [0] * len(homes)
        """Updates that each layer has had."""
        self.shard = [0] * len(homes)
        self.torn = [False] * len(homes)
        """Whether the shard is half written."""
        self.slots: dict[tuple[Part, int], tuple[int, int]] = {}
        """(layer, version) of what each slot holds."""

    def slot(self, layer: int, part: Part) -> tuple[Part, int] | None:
        home = self.homes[layer]
        number = home.weight_slot if part is Part.WEIGHTS else home.state_slot
        return None if number is None else (part, number)

    @rule(data=st.data(), part=st.sampled_from(Part), move=st.sampled_from(Move))
    def attempt(self, data: st.DataObject, part: Part, move: Move) -> None:
        layer = data.draw(st.integers(0, len(self.homes) - 1))
        before = snapshot(self.table, len(self.homes))
        try:
            result = self.table.move(layer, part, move)
        except TierError as refusal:
            assert f"layer {layer}" in str(refusal)
            assert snapshot(self.table, len(self.homes)) == before
            return
        assert result is self.table.residency(layer, part)
        place = self.slot(layer, part)
        assert place is not None
        if move is Move.BEGIN_LOAD:
            assert not self.torn[layer] and self.shard[layer] == self.truth[layer], "a stale shard was read"
            self.slots[place] = (layer, self.shard[layer])
        elif move in (Move.FILL, Move.UPDATE):
            self.truth[layer] += 1
            self.slots[place] = (layer, self.truth[layer])
        elif move is Move.BEGIN_STORE:
            self.torn[layer] = True
        elif move is Move.END_STORE:
            self.shard[layer], self.torn[layer] = self.slots[place][1], False
        elif move is Move.EVICT:
            assert not self.torn[layer] and self.shard[layer] == self.truth[layer], "an update was lost"

    @invariant()
    def whatever_is_resident_is_the_newest_version(self) -> None:
        for layer, residencies in enumerate(snapshot(self.table, len(self.homes))):
            for part, residency in zip((Part.WEIGHTS, Part.STATE), residencies, strict=True):
                place = self.slot(layer, part)
                if place is not None and residency is not Residency.ON_DISK:
                    assert self.table.holder(*place) == layer
                    assert self.slots[place] == (layer, self.truth[layer])

    @invariant()
    def held_slots_are_those_of_layers_in_ram(self) -> None:
        held = {
            place
            for layer, residencies in enumerate(snapshot(self.table, len(self.homes)))
            for part, residency in zip((Part.WEIGHTS, Part.STATE), residencies, strict=True)
            if residency is not Residency.ON_DISK and (place := self.slot(layer, part)) is not None
        }
        for part in Part:
            for number in (0, 1):
                assert (self.table.holder(part, number) is not None) == ((part, number) in held)


AnyMoves.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyMoves = AnyMoves.TestCase
