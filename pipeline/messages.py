"""What actors and the driver send each other: small frozen dataclasses, importable everywhere, never tensors.

Token ids are the one array among them (kilobytes a step); weights, gradients and activations stay in the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""Target of a position that is not supervised, as in Hugging Face."""

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one step. All arrays are int32 [num_micro_batches, micro_batch, sequence_length]."""

    input_ids: TokenArray
    targets: TokenArray
    """The token that each position must predict, already shifted within its document; IGNORED where none."""
    position_ids: TokenArray
    """Position in the document; a zero starts a new one. Attention never crosses documents."""
    tokens: int
    """Real tokens, padding left out."""
    supervised_tokens: int
    """Targets that are not IGNORED, over the whole step: what the loss is divided by."""
    single_document: bool
    """Every sequence is one document, so plain causal attention is exact."""


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where in the data the next step begins: a sequence of an epoch's permutation."""

    epoch: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class StepControl:
    """What an update needs to know of its step. Travels along the edges of the graph as a result."""

    applied: bool
    """False where the loss or the gradient norm is not finite: the update then leaves every bit as it was."""
    applied_steps: int
    """Steps applied so far, this one included if applied: t of Adam's bias correction."""
    lr: float
    """Learning rate of this update: the schedule at `applied_steps`."""
    clip_coefficient: float
    """Gradients are multiplied by it: min(1, max_grad_norm / (grad_norm + 1e-6)), 1 without clipping."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a finished step reports."""

    control: StepControl
    loss: float
    """Sum of token losses / supervised tokens of the whole step."""
    grad_norm: float
    """Global L2 norm before clipping, fp64 over layers, each parameter once."""
    non_finite: str | None
    """Name of the first layer whose gradient is not finite, or `loss`; None where all is finite."""
    gpu_peak_bytes: int
    compiled_graphs: int = field(compare=False)
    """By the compute process since it started, no part of what a step computes. A rise in later steps is time lost."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """Of an evaluation pass: token-weighted, so that passes add up."""

    loss_sum: float
    supervised_tokens: int


class Lane(StrEnum):
    """What a span of time kept busy."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    UPDATE = "update"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One operation on one lane. Times are `time.monotonic()`, which all processes of a Linux machine share."""

    name: str
    """The operation, e.g. `forward[17]`."""
    lane: Lane
    actor: str
    start_s: float
    end_s: float
    num_bytes: int = 0
