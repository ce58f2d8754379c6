"""What lent state takes of the device beside activations, against a walk through the backward and the next forward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.families import load_model_spec, model_layout
from pipeline.memory.device_extras import Extras
from pipeline.memory.lent_room import Activations, lent_bytes
from support.tiny import tiny_config
from tiers.layout import ModelLayout, Precision

DECODERS = 12
STATE_BYTES, GRADIENT_BYTES = 10, 2


def model() -> ModelLayout:
    return model_layout(load_model_spec(tiny_config("qwen2", num_hidden_layers=DECODERS), Precision.BF16))


def most_held(layout: ModelLayout, extras: Extras, held: Activations) -> int:
    """The most of activations, lent state and its gradients at any time of a step, boundaries of every layer kept."""
    first = held.decoders + 1 - extras.in_lent_room
    lent = STATE_BYTES * sum(layout.layers[layer].numel for layer in extras.device_updates)

    def activations(below: int) -> int:
        """Of layers under `below`."""
        kept = max(0, below - 1 - (held.decoders - held.kept))
        return (below - 1) * held.boundary_bytes + kept * held.graph_bytes

    most, gradients = activations(held.decoders + 1), 0
    for layer in range(held.decoders, -1, -1):
        if layer in extras.device_updates:
            gradients += GRADIENT_BYTES * layout.layers[layer].numel
        # At the end of the layer's backward; its input, and the gradient of that, are there by then and counted apart.
        state = lent if layer <= first else 0
        most = max(most, activations(max(layer, 1)) + state + gradients)
    return max(most, activations(first) + lent)  # the next forward, up to the first that waits


@pytest.mark.parametrize("kept", [0, 2, 7])
@pytest.mark.parametrize("in_room", [1, 3, 6])
@pytest.mark.parametrize("boundary_bytes", [1 << 12, 1 << 17, 1 << 20])
def test_the_account_is_what_a_walk_through_the_step_finds(kept: int, in_room: int, boundary_bytes: int) -> None:
    layout, extras = model(), Extras((0, 1, 2, 3), kept, in_lent_room=in_room)
    held = Activations(DECODERS, kept, 1, boundary_bytes, graph_bytes=3 * boundary_bytes)
    accounted = held.of_last(DECODERS) + lent_bytes(layout, extras, held, STATE_BYTES, GRADIENT_BYTES)
    found = most_held(layout, extras, held)
    assert found <= accounted
    if accounted > held.of_last(DECODERS):
        # Graphs of layers above those that share are counted as gone no earlier than the first of these.
        assert accounted <= found + boundary_bytes


def test_layers_that_do_not_share_leave_no_room() -> None:
    layout, held = model(), Activations(DECODERS, 4, 1, 1 << 20, 1 << 20)
    apart = Extras((0, 1), 4)
    whole = (STATE_BYTES + GRADIENT_BYTES) * sum(layout.layers[layer].numel for layer in (0, 1))
    assert lent_bytes(layout, apart, held, STATE_BYTES, GRADIENT_BYTES) == whole
    assert lent_bytes(layout, replace(apart, in_lent_room=4), held, STATE_BYTES, GRADIENT_BYTES) < whole


def test_of_thinned_boundaries_the_last_layers_leave_what_the_others_do_not_hold() -> None:
    held = Activations(DECODERS, 0, 4, 100, 0)
    # Three groups: the inputs of two, and all four of the last.
    assert held.of_last(DECODERS) == 600
    assert held.of_last(4) == 100, "of the eight others five: one group's, and all four of the last"
    assert held.of_last(0) == 0
