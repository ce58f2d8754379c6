"""Placements that a test chooses for a run, so that it has operations which the plan would not choose here."""

from __future__ import annotations

from dataclasses import dataclass

HOMES = "MEGATRAIN_HOMES"
"""Variable that tells `support.placed_train` where layers live."""


@dataclass(frozen=True)
class Homes:
    """A placement of the test's own, for layers from 0, the embedding, to the head."""

    state_on_nvme: tuple[int, ...] = ()
    weights_on_nvme: tuple[int, ...] = ()
    staging_slots: int = 2
    device_updates: tuple[int, ...] = ()
    kept_layers: int = 0
    decoder_slots: int = 2
    boundary_every: int = 1
    waves: int = 1


ROOMY = Homes(state_on_nvme=(3, 4, 5), weights_on_nvme=(3, 4), device_updates=(0, 1, 2), kept_layers=1)
"""Layers are updated on the device."""
NARROW = Homes(state_on_nvme=(1, 2, 3, 4), weights_on_nvme=(2, 3), decoder_slots=3, boundary_every=2, waves=2)
"""Inputs of layers are made anew, and sums of gradients wait for the next wave."""
