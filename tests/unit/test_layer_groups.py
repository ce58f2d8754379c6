"""Which inputs stay, held against a count of what forward and backward hold at any moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.step.layer_groups import LayerGroups


def most_held(groups: LayerGroups) -> int:
    """Inputs of recomputed layers held at once, forward and backward walked through layer by layer.

    What a layer reads and is then rid of counts with what it makes as one: the account has a place for it.
    """
    held: set[int] = set()
    most = 0
    for layer in range(1, groups.recomputed + 1):
        if groups.keeps_input(layer):
            held.add(layer)
        most = max(most, len(held))
    for layer in range(groups.recomputed, 0, -1):
        for lower in groups.made_again(layer):
            assert lower in held
            held.add(lower + 1)
        most = max(most, len(held))
        assert layer in held, f"the backward of layer {layer} finds no input"
        held.remove(layer)
    assert not held
    return most


@given(recomputed=st.integers(0, 40), every=st.integers(1, 12))
def test_the_account_has_what_a_walk_through_the_layers_holds(recomputed: int, every: int) -> None:
    groups = LayerGroups(recomputed, every)
    # One group alone may be shorter than the account takes it for.
    assert most_held(groups) <= groups.most_inputs <= most_held(groups) + (every if groups.count == 1 else 1)


@given(recomputed=st.integers(1, 40), every=st.integers(1, 12))
def test_what_is_needed_next_is_at_hand_or_the_input_of_the_group_below(recomputed: int, every: int) -> None:
    groups = LayerGroups(recomputed, every)
    for layer in range(2, recomputed + 3):
        needed = groups.needed_next(layer)
        assert needed < layer and groups.keeps_input(needed)
        assert needed == layer - 1 or needed == groups.group(layer - 1)[0]
