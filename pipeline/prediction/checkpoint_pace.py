"""How long a checkpoint takes at best, and how long the run waits for it. A closed formula on the drive's rate. Pure.

The step after a checkpoint's may update a layer once it is written or copied to staging memory
(`memory.checkpoint_staging`). It waits for what neither the drive takes in the length of a step nor that memory holds,
and for all of layers on NVMe, which are copied from file to file. The next checkpoint waits for the end of this one.
Copies, and what drives lose beside other work, are not in it: an H200 machine's steps waited 1.3 times what follows
from its drive's rate, without staging memory 1.7 times (BENCHMARKS.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.memory.checkpoint_staging import state_bytes_in_ram
from pipeline.memory.footprint import total
from pipeline.memory.host_footprint import staging_terms
from pipeline.messages import Lane
from pipeline.placement import Placement
from pipeline.prediction.hardware import Nvme
from pipeline.prediction.simulate import Prediction
from tiers.host_memory import GIB
from tiers.shards import store_bytes


@dataclass(frozen=True, slots=True)
class CheckpointPace:
    """Of checkpoints that are not compressed."""

    write_gbps: float
    """Of the drive, while the steps read there too if they do."""
    write_s: float
    """To write one."""
    every_steps: int
    """From one to the next; 0: there is one, at the end, and nothing waits."""
    wait_s: float
    """By which the steps from one to the next are longer for it."""
    wait_share: float
    """Of their length without it."""
    too_often: bool
    """Whether one takes longer to write than the steps to the next, which then waits for it."""
    enough_staging_gib: int
    """`checkpoint.staging_gib` with which they would wait for nothing but copies; 0 where they do not wait, where RAM
    has no room for that, and where they would wait all the same: for layers on NVMe, or since checkpoints come too
    often."""


def checkpoint_pace(
    placement: Placement, prediction: Prediction, drive: Nvme, *, every_steps: int, room_bytes: int
) -> CheckpointPace:
    """Predict for checkpoints on a drive like that of the machine, where its layers on NVMe lie too.

    Args:
        placement: With its staging memory.
        prediction: Of its steps.
        drive: Whose rates.
        every_steps: From one to the next; 0 where the only one comes at the end.
        room_bytes: Of RAM, for staging memory.
    """
    tier, num_bytes = placement.tier, store_bytes(placement.tier.model)
    on_nvme = any(home.state_slot is not None for home in tier.homes)
    gbps = drive.write_busy_gbps if on_nvme else drive.write_gbps
    write_s, steps_s = num_bytes / gbps / 1e9, every_steps * prediction.step_s
    if not every_steps:
        return CheckpointPace(gbps, write_s, 0, 0.0, 0.0, False, 0)
    busy_s = sum(load.busy_s for load in prediction.lanes if load.lane is Lane.NVME_WRITE)
    beside_bytes = max(0.0, prediction.step_s - busy_s) * gbps * 1e9
    staged = min(placement.staging_bytes, state_bytes_in_ram(tier))
    late_bytes = max(0.0, num_bytes - beside_bytes - staged)
    wait_s, too_often = max(late_bytes / gbps / 1e9, write_s - steps_s), write_s > steps_s
    enough_gib = math.ceil((staged + late_bytes) / GIB)
    helps = late_bytes and not on_nvme and not too_often and total(staging_terms(enough_gib * GIB)) <= room_bytes
    return CheckpointPace(
        write_gbps=gbps,
        write_s=write_s,
        every_steps=every_steps,
        wait_s=wait_s,
        wait_share=wait_s / steps_s,
        too_often=too_often,
        enough_staging_gib=enough_gib if helps else 0,
    )
