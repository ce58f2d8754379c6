"""What a placement is asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.memory.footprint import Place, Term, total
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from pipeline.schedule import SchedulePlan
from tiers.arena_map import ArenaMap, TierPlan
from tiers.layout import Buffer, ElementType, ModelLayout, buffer_types


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a run may use."""

    ram_bytes: int
    """Host memory for model state: the arena. What the processes take beside it is `process_terms`."""
    gpu_bytes: int
    nvme_bytes: int = 0
    """Free room of `[memory] nvme_dir`; 0 where there is none."""


@dataclass(frozen=True)
class PlacementRequest:
    """Everything the decision depends on, besides the budget."""

    model: ModelLayout
    compute: ComputeShape
    step: StepShape
    clip: bool
    """Global clipping holds every gradient until the norm is known."""
    processes: ProcessShape = field(default_factory=ProcessShape)
    staging_slots: int = 3
    """The most RAM slots that the layers on NVMe share, for weights and for state each; fewer where they do not fit."""
    decoder_slots: int = 2
    gradient_type: ElementType | None = None
    """None means that of the precision."""
    device_updates: bool = True
    """Whether layers may be updated on the device; only with clipping and a GPU."""
    kept_layers: int | None = None
    """The most decoder layers that are not recomputed; None for as many as the device has room for."""
    boundary_every: int | None = None
    """Of so many recomputed decoder layers one keeps its input for the backward; None for what fits."""
    waves: int | None = None
    """Parts of the step that pass all layers one after another; None for what fits."""
    mlp_chunk_tokens: int | None = None
    """Tokens that pass a recomputed layer's feed-forward network at a time, 0 for a micro-batch; None: chunks where the
    device needs them."""

    @property
    def outgoing_type(self) -> ElementType:
        """In which gradients leave the device."""
        return buffer_types(self.model.precision, self.gradient_type)[Buffer.GRADIENT]

    @property
    def weight_bytes(self) -> int:
        """An element of weights and activations."""
        return buffer_types(self.model.precision)[Buffer.WEIGHT].bytes


@dataclass(frozen=True)
class Placement:
    """Where everything lives, and the account of it."""

    tier: TierPlan
    schedule: SchedulePlan
    spilled_boundaries: int
    """Kept inputs of decoder layers, the first ones, that wait for their backward in pinned RAM."""
    budget: MemoryBudget
    terms: tuple[Term, ...]
    step: StepShape
    """With the micro-batch that was chosen."""
    mlp_chunk_tokens: int = 0
    """Tokens that pass a recomputed layer's feed-forward network at a time; 0 for a whole micro-batch."""
    staging_bytes: int = 0
    """The most host memory that a checkpoint holds copies in while training goes on."""

    @property
    def arena_bytes(self) -> int:
        """Host memory for model state."""
        return ArenaMap.of(self.tier).total_bytes

    @property
    def holds_every_input(self) -> bool:
        """Whether the device holds every layer's input of a whole step: no way of holding them had to be chosen."""
        return not self.spilled_boundaries and self.schedule.boundary_every == self.schedule.waves == 1

    def used(self, place: Place) -> int:
        """Bytes that the run holds in `place`."""
        return total(term for term in self.terms if term.place is place)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier that cannot hold what it must."""

    place: Place
    needed_bytes: int
    terms: tuple[Term, ...]
