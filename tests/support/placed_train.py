"""`tasks.train` on the CPU with a placement of the test's choice: it has kinds of operation that the plan would choose
for a GPU alone, or for one with little memory.

    python -m support.placed_train RECIPE ...     with the variable MEGATRAIN_HOMES = JSON of Homes

What a placement may not change is what is learned: the undisturbed run that it is held against is placed as usual.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from pipeline.memory.homes import homes, without_ram_gradients
from pipeline.placement import Placement
from support.chosen_homes import HOMES, Homes
from tasks import preparation, train

place_recipe = preparation.place_recipe


def placed(*arguments: Any, **options: Any) -> Placement:
    """The placement that fits, with the layers moved to where the environment wants them."""
    wanted = Homes(**json.loads(os.environ[HOMES]))
    usual = place_recipe(*arguments, **options)
    model, in_waves = usual.tier.model, wanted.waves > 1
    moved = homes(
        model,
        clip=usual.schedule.clip or in_waves,
        state=wanted.state_on_nvme,
        weights=wanted.weights_on_nvme,
        staging_slots=wanted.staging_slots,
    )
    if wanted.device_updates:
        moved = without_ram_gradients(moved, wanted.device_updates)
    schedule = replace(
        usual.schedule,
        decoder_slots=wanted.decoder_slots,
        weight_slots=tuple(home.weight_slot for home in moved),
        state_slots=tuple(home.state_slot for home in moved),
        gradient_slots=tuple(home.gradient_slot for home in moved),
        gradient_spans=tuple(home.gradient_span for home in moved),
        device_gradients=tuple(home.gradient_on_device for home in moved),
        device_updates=tuple(wanted.device_updates),
        kept_layers=wanted.kept_layers,
        boundary_every=wanted.boundary_every,
        waves=wanted.waves,
    )
    return replace(usual, tier=replace(usual.tier, homes=moved, gradient_sums=in_waves), schedule=schedule)


if __name__ == "__main__":
    preparation.place_recipe = placed
    sys.exit(train.main())
