"""What a training step is made of: kinds of operation, their names and what each waits for.

`schedule` puts them in order; nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """Kinds of operation."""

    BEGIN = "begin"
    """Give the step's token ids to the device."""
    LOAD_WEIGHTS = "load_weights"
    """NVMe -> the layer's weight slot in RAM; absent where the weights live in RAM."""
    STAGE = "stage"
    """RAM -> device slot, one DMA of the layer's flat weights. Of weights that live on NVMe it returns when they have
    been read, since their RAM slot is then loaded anew."""
    FORWARD = "forward"
    """Every micro-batch through the layer; keeps the layer's inputs."""
    HEAD = "head"
    """Final norm, LM head and cross-entropy in token chunks, forward and backward at once."""
    RECOMPUTE = "recompute"
    """Forward once more through a layer whose input is at hand, for the backward of the next, whose input is not."""
    BACKWARD = "backward"
    """Recompute and backward for every micro-batch; gradients summed in fp32 on the device."""
    OFFLOAD = "offload"
    """Device gradient -> the layer's gradient slot in RAM; returns when the bytes have landed."""
    STORE_SUM = "store_sum"
    """Of a step in waves: the fp32 sum of a layer's gradient -> RAM, where it waits for the next wave."""
    FETCH_SUM = "fetch_sum"
    """That sum -> the accumulator on the device, where the next wave goes on with it."""
    LOSS = "loss"
    """The loss, known on the host before any update: decides whether the step is applied, without clipping."""
    NORM = "norm"
    """The global gradient norm and the step's result; with clipping it decides whether and how the step is applied."""
    LOAD_STATE = "load_state"
    """Optimizer state NVMe -> the layer's state slot in RAM; absent where it lives in RAM."""
    UPDATE = "update"
    """AdamW in place, a part of the layer by each optimizer actor."""
    LEND_STATE = "lend_state"
    """Optimizer state of a layer that is updated on the device: RAM -> device, while the link is idle."""
    UPDATE_ON_DEVICE = "update_on_device"
    """AdamW in place on the device, in the slot where the layer lies and its next forward reads it."""
    RETURN_STATE = "return_state"
    """Weights and state of such a layer: device -> RAM; returns when the bytes have landed."""
    STORE_STATE = "store_state"
    """The layer's state slot -> NVMe."""
    SNAPSHOT = "snapshot"
    """The layer's state -> a checkpoint, while training goes on, over as many steps as it takes."""
    CAPTURE = "capture"
    """What the step before has not yet written of a layer in RAM -> staging memory, as far as that goes. Returns when
    the layer may be updated; absent where the step before wrote no checkpoint."""
    EVALUATE = "evaluate"
    """Final norm, LM head and the sum of token losses, without gradients."""


class Pass(StrEnum):
    """A layer's weights are streamed at most once in each pass of a wave."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Key(NamedTuple):
    """Names an operation within a step."""

    op: Op
    layer: int = -1
    pass_: Pass = Pass.FORWARD
    wave: int = 0

    def __str__(self) -> str:
        """As the dashboard and `ray timeline` show it."""
        layer = f"[{self.layer}]" if self.layer >= 0 else ""
        again = "re" if self.pass_ is not Pass.FORWARD and self.op in (Op.STAGE, Op.LOAD_WEIGHTS) else ""
        wave = f" wave {self.wave + 1}" if self.wave else ""
        return f"{again}{self.op}{layer}{wave}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a step."""

    key: Key
    after: tuple[Key, ...] = ()
    """Operations of this step that must have returned."""
    after_last: tuple[Key, ...] = ()
    """Operations of the step before that must have returned; void where it had none such."""
    slot: int = -1
    """Device slot that STAGE fills and FORWARD, HEAD, RECOMPUTE, BACKWARD read."""


EMBEDDING_SLOT = -1
"""Device slot of the embedding. An untied head may share its memory: the edges allow it."""
HEAD_SLOT = -2
"""Device slot of the head layer: the LM head matrix with the final norm, or the final norm alone where tied."""
