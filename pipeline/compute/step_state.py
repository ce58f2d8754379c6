"""What Compute keeps of a step between its operations: ids, running sums, gradients of activations.

Two steps may be in flight, so everything is kept under the step's number. Training steps count from 0 up; evaluation
passes have numbers below zero and keep nothing for a backward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from pipeline.compute.activations import MicroBatches
from pipeline.compute.streams import Mark
from pipeline.compute.template import KeptGraph
from pipeline.errors import TokenIdError
from pipeline.families.attention import AttentionContext
from pipeline.messages import IGNORED, Batch
from pipeline.step.waves import micro_batches_of

T = TypeVar("T")


@dataclass
class StepState:
    """One step. The device has done with its tensors once `norm` or the evaluation's head has read the results."""

    step: int
    supervised_tokens: int
    input_ids: list[torch.Tensor]
    """By micro-batch: int64 [micro_batch, sequence]."""
    targets: list[torch.Tensor]
    """By micro-batch: int64 [micro_batch, sequence], IGNORED where not supervised."""
    contexts: list[AttentionContext]
    """By micro-batch: which positions see which, and their rotary tables."""
    loss: torch.Tensor
    """fp64 scalar: sum over the micro-batches, complete at `loss_known`."""
    sums_of_squares: torch.Tensor
    """fp64 [layers]: of the gradients, complete at `sums_known`."""
    begun: Mark
    """When the tensors above were made."""
    waves: int = 1
    """Parts in which the micro-batches pass all layers one after another."""
    wave: int = -1
    """The one at work; `begin_wave` counts."""
    gradients: MicroBatches = field(default_factory=list)
    """By micro-batch of the wave: gradient of the loss with respect to the output of the layer whose backward comes
    next."""
    embedding_gradients: MicroBatches = field(default_factory=list)
    """By micro-batch of the waves before: gradient with respect to the embedding's output. Its backward comes once."""
    graphs: dict[int, list[KeptGraph]] = field(default_factory=dict)
    """By layer that is not recomputed: what its forward kept, one a micro-batch."""
    loss_known: Mark | None = None
    sums_known: Mark | None = None

    def begin_wave(self) -> None:
        """Turn to the next wave's micro-batches, once the last layer's backward of the wave before is enqueued."""
        self.wave += 1
        assert self.wave < self.waves
        self.embedding_gradients += self.gradients
        self.gradients = []

    def at_work(self, by_micro_batch: Sequence[T]) -> Sequence[T]:
        """Of a sequence over all micro-batches, the part of the wave at work."""
        part = micro_batches_of(self.wave, self.waves, len(by_micro_batch))
        return by_micro_batch[part.start : part.stop]

    @property
    def in_last_wave(self) -> bool:
        """Whether gradients are complete when this wave has been through a layer."""
        return self.wave == self.waves - 1

    @property
    def training(self) -> bool:
        """Whether a backward follows."""
        return self.step >= 0


class StepsInFlight:
    """The states of the steps that have begun and not ended. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[int, StepState] = {}

    def add(self, state: StepState) -> None:
        """Begin a step."""
        with self._lock:
            assert state.step not in self._states, f"step {state.step} has begun already"
            self._states[state.step] = state

    def __getitem__(self, step: int) -> StepState:
        with self._lock:
            return self._states[step]

    def end(self, step: int) -> None:
        """Forget a step and free what it holds."""
        with self._lock:
            del self._states[step]


def check_ids(batch: Batch, vocab_size: int) -> None:
    """Refuse ids that the embedding has no row for: on the device they would take the whole process down.

    Raises:
        TokenIdError: An input id outside 0 to vocab_size - 1, or a target outside it that is not IGNORED.
    """
    for what, ids, exempt in (("input id", batch.input_ids, None), ("target", batch.targets, IGNORED)):
        bad = (ids < 0) | (ids >= vocab_size)
        if exempt is not None:
            bad &= ids != exempt
        if bad.any():
            micro_batch, sequence, position = (int(index[0]) for index in np.nonzero(bad))
            allowed = f"0 to {vocab_size - 1}" + (f", or {exempt} where there is none" if exempt is not None else "")
            raise TokenIdError(
                f"{what} {ids[micro_batch, sequence, position]} at micro-batch {micro_batch}, sequence {sequence}, "
                f"position {position} ({int(bad.sum())} such): the model's vocab_size of {vocab_size} "
                f"allows {allowed}; use the tokenizer that belongs to the model"
            )
