"""What happens on the device, in the one process that touches it: `compute` is the actor, `passes` a step's work."""

from __future__ import annotations

from pipeline.compute.compute import ACTOR_NAME, Compute, ComputeActor, ComputeSettings

__all__ = ["ACTOR_NAME", "Compute", "ComputeActor", "ComputeSettings"]
