"""How long a checkpoint takes, and how long the step after it waits for it. A closed formula on the drive's rate. Pure.

That step may update a layer once it is written or copied to staging memory (`memory.checkpoint_staging`). What neither
the drive takes in the length of a step nor that memory holds is waited for, and all of layers on NVMe, which are copied
from file to file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.messages import Lane
from pipeline.placement import Placement
from pipeline.prediction.hardware import Nvme
from pipeline.prediction.simulate import Prediction
from tiers.host_memory import GIB
from tiers.shards import store_bytes


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """Of a checkpoint that is not compressed."""

    write_gbps: float
    """Of the drive, beside what the steps read there."""
    write_s: float
    """To write it."""
    wait_s: float
    """By which the step after the checkpoint's is longer."""
    enough_staging_gib: int
    """`checkpoint.staging_gib` with which it would wait for nothing; 0 where it does not wait, where RAM has no room
    for that, and where it would wait all the same, for layers on NVMe."""


def checkpoint_pace(placement: Placement, prediction: Prediction, drive: Nvme) -> CheckpointPace:
    """Predict for checkpoints on a drive like that of the machine, with layers on NVMe on the very drive.

    Args:
        placement: With its staging memory.
        prediction: Of its steps.
        drive: Whose rates.
    """
    tier, staged = placement.tier, placement.staging_bytes
    on_nvme = any(home.state_slot is not None for home in tier.homes)
    gbps = drive.write_busy_gbps if on_nvme else drive.write_gbps
    busy_s = sum(load.busy_s for load in prediction.lanes if load.lane is Lane.NVME_WRITE)
    beside_bytes = max(0.0, prediction.step_s - busy_s) * gbps * 1e9
    late_bytes = max(0.0, store_bytes(tier.model) - beside_bytes - staged)
    enough_gib = math.ceil((staged + late_bytes) / GIB)
    room = placement.budget.ram_bytes - placement.arena_bytes
    helps = late_bytes and enough_gib * GIB <= room and not on_nvme
    return CheckpointPace(
        write_gbps=gbps,
        write_s=store_bytes(tier.model) / gbps / 1e9,
        wait_s=late_bytes / gbps / 1e9,
        enough_staging_gib=enough_gib if helps else 0,
    )
