"""A step's graph while it is built: its operations, and who used each piece of shared memory last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.step.operations import HEAD_SLOT, Key, Operation
from pipeline.step.schedule_plan import SchedulePlan


class Resource(NamedTuple):
    """Memory that several layers use in turn."""

    kind: str
    slot: int


class Graph:
    """Appends operations and remembers who used each resource last, so that the next user waits for it."""

    def __init__(self, plan: SchedulePlan, carried: Mapping[Resource, Key]) -> None:
        """Start empty.

        Args:
            plan: Of the run.
            carried: Last user of each resource in the step before.
        """
        self.plan = plan
        self.holders: dict[Resource, Key] = {}
        self.operations: list[Operation] = []
        self._carried = carried
        self._taken: set[Resource] = set()
        """What an operation of this step has overwritten: its holders of the step before are done."""

    def add(
        self,
        key: Key,
        *,
        after: tuple[Key, ...] = (),
        after_last: tuple[Key, ...] = (),
        takes: tuple[Resource, ...] = (),
        holds: tuple[Resource, ...] = (),
    ) -> Key:
        """Append an operation that overwrites `takes` and whose return frees `holds`; return its key."""
        for resource in takes:
            if resource in self.holders:
                after = (*after, self.holders[resource])
            if resource in self._carried and resource not in self._taken:
                after_last = (*after_last, self._carried[resource])
            self._taken.add(resource)
        slot = self.plan.device_slot(key.layer) if key.layer >= 0 else HEAD_SLOT
        self.operations.append(Operation(key, _unique(after), _unique(after_last), slot))
        self.holders.update(dict.fromkeys(holds, key))
        return key

    def device(self, layer: int) -> Resource:
        """The slot where the layer's weights lie on the device."""
        return Resource("device", self.plan.device_slot(layer))

    def outgoing(self, layer: int) -> Resource:
        """The buffer where the layer's gradient lies once it is complete."""
        if self.plan.gradient_on_device(layer):
            return Resource("held gradient", layer)
        return Resource("outgoing", (self.plan.head - layer) % self.plan.outgoing_buffers)

    def gradient(self, layer: int) -> tuple[Resource, ...]:
        """The RAM slots that the layer's gradient leaves for."""
        return tuple(Resource("gradient", slot) for slot in self.plan.ram_gradient(layer))


def _unique(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    return tuple(dict.fromkeys(keys))
