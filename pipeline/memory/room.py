"""What a machine has and what of it a recipe allows: the budget of a placement follows from both. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.memory.footprint import GIB, total
from pipeline.memory.host_footprint import page_mappings, process_terms
from pipeline.memory.placement_request import MemoryBudget
from pipeline.memory.shapes import ProcessShape

DEVICE_RESERVE = 0.01
"""Share of free device memory left alone: the allocator's pools never fill to the last block."""

CPU_DEVICE_SHARE = 0.25
"""Where the CPU stands in for the device, share of host memory that its slots and activations may take unless the
recipe says otherwise."""

UNKNOWN_BYTES = 2**60
"""More than any machine has: stands for one that nobody has described."""


@dataclass(frozen=True, slots=True)
class Room:
    """A machine's memory and a recipe's limits."""

    host_bytes: int
    """min(MemAvailable, cgroup headroom), or a described machine's memory."""
    gpu_bytes: int
    """Free memory of the GPU; without meaning where the CPU stands in for it."""
    nvme_bytes: int
    """Free bytes behind `[memory] nvme_dir`; 0 where the recipe names none."""
    ram_limit: int | None = None
    """`memory.ram_gib` in bytes; None where the recipe sets none, as of the next two."""
    gpu_limit: int | None = None
    nvme_limit: int | None = None
    cuda: bool = True
    """Whether there is a GPU; else what it would hold is in host memory too."""
    reserved_bytes: int = 0
    """Host memory that the recipe gives to something else than model state and what stands in for a GPU."""

    @classmethod
    def within(cls, budget: MemoryBudget) -> Room:
        """A machine that nobody has described, of which a recipe allows `budget`."""
        return cls(UNKNOWN_BYTES, UNKNOWN_BYTES, budget.nvme_bytes, budget.ram_bytes, budget.gpu_bytes)

    def budget(self, processes: ProcessShape) -> MemoryBudget:
        """The smaller of what the recipe allows and what the machine has beside the run's processes."""
        ram_bytes = max(0, ram_for_state(self.host_bytes, processes) - self.reserved_bytes)
        if self.cuda:
            gpu_bytes = _at_most(self.gpu_limit, int(self.gpu_bytes * (1 - DEVICE_RESERVE)))
        else:
            share = int(self.host_bytes * CPU_DEVICE_SHARE) if self.gpu_limit is None else self.gpu_limit
            gpu_bytes = min(share, ram_bytes)
            ram_bytes -= gpu_bytes
        return MemoryBudget(_at_most(self.ram_limit, ram_bytes), gpu_bytes, _at_most(self.nvme_limit, self.nvme_bytes))


def ram_for_state(available_bytes: int, processes: ProcessShape) -> int:
    """The most an arena may take of `available_bytes` (min of MemAvailable and the cgroup's headroom).

    Leaves room for the run's processes and page tables, and a reserve for the rest of the machine.
    """
    reserve = min(GIB, available_bytes // 16)
    fixed = total(process_terms(0, processes))
    return max(0, (available_bytes - reserve - fixed) * 512 // (512 + page_mappings(processes)))


def _at_most(limit_bytes: int | None, available_bytes: int) -> int:
    return available_bytes if limit_bytes is None else min(limit_bytes, available_bytes)
