"""The one place that knows the order of a training step: a pure function from a plan to a graph of operations.

`coordinator` submits the graph as Ray calls, `simulate` prices it, tests walk it. An edge means "may start once that
call has returned"; device work behind a returned call is ordered on the device by streams and events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiers.layout import LayerKind


class Op(StrEnum):
    """Kinds of operation."""

    BEGIN = "begin"
    """Give the step's token ids to the device."""
    LOAD_WEIGHTS = "load_weights"
    """NVMe -> the layer's weight slot in RAM; absent where the weights live in RAM."""
    STAGE = "stage"
    """RAM -> device slot, one DMA of the layer's flat weights."""
    FORWARD = "forward"
    """Every micro-batch through the layer; keeps the layer's inputs."""
    HEAD = "head"
    """Final norm, LM head and cross-entropy in token chunks, forward and backward at once."""
    BACKWARD = "backward"
    """Recompute and backward for every micro-batch; gradients summed in fp32 on the device."""
    OFFLOAD = "offload"
    """Device gradient -> the layer's gradient slot in RAM; returns when the bytes have landed."""
    LOSS = "loss"
    """The loss, known on the host before any update: decides whether the step is applied, without clipping."""
    NORM = "norm"
    """The global gradient norm and the step's result; with clipping it decides whether and how the step is applied."""
    LOAD_STATE = "load_state"
    """Optimizer state NVMe -> the layer's state slot in RAM; absent where it lives in RAM."""
    UPDATE = "update"
    """AdamW in place, a part of the layer by each optimizer actor."""
    STORE_STATE = "store_state"
    """The layer's state slot -> NVMe."""
    SNAPSHOT = "snapshot"
    """The layer's state -> a checkpoint, while training goes on."""


class Pass(StrEnum):
    """A layer's weights are streamed once in each pass of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Key(NamedTuple):
    """Names an operation within a step."""

    op: Op
    layer: int = -1
    pass_: Pass = Pass.FORWARD

    def __str__(self) -> str:
        """As the dashboard and `ray timeline` show it."""
        layer = f"[{self.layer}]" if self.layer >= 0 else ""
        return f"re{self.op}{layer}" if self.pass_ is Pass.BACKWARD else f"{self.op}{layer}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a step."""

    key: Key
    after: tuple[Key, ...] = ()
    """Operations of this step that must have returned."""
    after_last: tuple[Key, ...] = ()
    """Operations of the step before that must have returned; void in the first step."""
    slot: int = -1
    """Device slot that STAGE fills and FORWARD, HEAD, BACKWARD read."""


@dataclass(frozen=True)
class SchedulePlan:
    """What the order of a step depends on."""

    kinds: tuple[LayerKind, ...]
    """Of each layer in forward order: EMBEDDING, DECODER ..., HEAD."""
    tied: bool
    clip: bool
    """Global clipping: updates wait for the norm and run in forward order."""
    decoder_slots: int = 2
    """Device slots that the decoder layers share: 2 is double buffering."""
    weight_slots: tuple[int | None, ...] = ()
    """By layer: RAM slot of weights that live on NVMe; empty or None where they live in RAM."""
    state_slots: tuple[int | None, ...] = ()
    """By layer: RAM slot of state that lives on NVMe; empty or None where it lives in RAM."""
    gradient_slots: tuple[int, ...] = ()
    """By layer: gradient slot in RAM; empty means one of its own for every layer."""
