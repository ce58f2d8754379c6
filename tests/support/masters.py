"""The fp32 master of a layer as one array, whichever way the arena holds it."""

from __future__ import annotations

from tiers.master import Float32Array, LayerState, join_master


def master_of(state: LayerState) -> Float32Array:
    """A copy of all of it, padding included."""
    if state.weight_low is None:
        values: Float32Array = state.weight.copy()
        return values
    return join_master(state.weight, state.weight_low)
