"""Options that say how a run is carried out leave its result as it is, in every bit.

One baseline a precision and a clipping mode: one optimizer actor, one thread, double buffering, all in RAM. Every
variant is the same run with other options, and must end with the same master and report the same losses and norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.messages import Batch, StepResult
from support.inline import Case, inline_run
from support.tiny import random_batch, tiny_config
from tiers.layout import Precision

STEPS = 10
LAYERS = tuple(range(7))
"""Embedding, five decoder layers, head."""
DECODERS = LAYERS[1:-1]

Weights = dict[str, torch.Tensor]


@cache
def batches(steps: int) -> tuple[Batch, ...]:
    return tuple(random_batch(seed, micro_batches=2, packed=True) for seed in range(steps))


def run(case: Case, steps: int = STEPS, seed: int = 1) -> tuple[list[StepResult], Weights]:
    with inline_run(case, seed) as started:
        return started.train(batches(steps)), started.weights()


@cache
def baseline(precision: Precision, max_grad_norm: float | None, steps: int = STEPS) -> tuple[list[StepResult], Weights]:
    return run(Case(tiny_config("llama"), precision, max_grad_norm), steps)


def assert_same(got: tuple[list[StepResult], Weights], wanted: tuple[list[StepResult], Weights]) -> None:
    """Losses, norms and every bit of every weight are equal."""
    assert [(r.loss, r.grad_norm) for r in got[0]] == [(r.loss, r.grad_norm) for r in wanted[0]]
    apart = differing(got[1], wanted[1])
    assert not apart, f"largest differences: {apart}"


def differing(got: Weights, wanted: Weights) -> dict[str, float]:
    """Largest difference of every tensor whose bits differ."""
    assert got.keys() == wanted.keys()
    return {
        name: float((got[name] - weight).abs().max())
        for name, weight in wanted.items()
        if not torch.equal(got[name].view(torch.int32), weight.view(torch.int32))
    }


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_actors": 3},
        {"threads": 2},
        {"optimizer_actors": 3, "threads": 2},
        {"decoder_slots": 1},
        {"decoder_slots": 3},
        {"outgoing_buffers": 1},
        {"activation_bytes": 1 << 20},
        {"kept_layers": 2},
        {"kept_layers": 5},
        {"kept_layers": 5, "own_slots": 2},
        {"kept_layers": 3, "own_slots": 3, "decoder_slots": 1},
        {"kept_layers": 4, "decoder_slots": 1, "activation_bytes": 1 << 20},
        {"boundary_every": 2, "decoder_slots": 3},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_workers_and_buffers_do_not_change_a_bit(
    options: dict[str, Any], precision: Precision, max_grad_norm: float | None
) -> None:
    case = replace(Case(tiny_config("llama"), precision, max_grad_norm), **options)
    assert_same(run(case), baseline(precision, max_grad_norm))


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("device_gradients", [1, 4, 7])
@pytest.mark.parametrize("state", [(), DECODERS], ids=["ram", "state on nvme"])
def test_gradients_that_wait_for_the_norm_on_the_device_do_not_change_a_bit(
    state: Sequence[int], device_gradients: int, precision: Precision, tmp_path: Path
) -> None:
    case = Case(
        tiny_config("llama"),
        precision,
        0.5,
        device_gradients=device_gradients,
        state_on_nvme=tuple(state),
        nvme_dir=tmp_path,
    )
    assert_same(run(case), baseline(precision, 0.5))


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("staging_slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "state", "weights"),
    [
        (Precision.FP32, DECODERS, ()),
        (Precision.FP32, LAYERS, DECODERS),
        (Precision.FP32, (2, 5), (5,)),
        (Precision.BF16, LAYERS, ()),
        (Precision.BF16, LAYERS, LAYERS),
    ],
    ids=["fp32-state", "fp32-state+weights", "fp32-mixed", "bf16-state", "bf16-everything"],
)
def test_nvme_placements_do_not_change_a_bit_in_20_steps(
    precision: Precision,
    state: Sequence[int],
    weights: Sequence[int],
    staging_slots: int,
    max_grad_norm: float | None,
    tmp_path: Path,
) -> None:
    """B09, B65."""
    case = Case(
        tiny_config("llama"),
        precision,
        max_grad_norm,
        state_on_nvme=tuple(state),
        weights_on_nvme=tuple(weights),
        staging_slots=staging_slots,
        nvme_dir=tmp_path,
    )
    assert_same(run(case, 20), baseline(precision, max_grad_norm, 20))


@pytest.mark.parametrize("precision", Precision)
def test_a_clip_that_never_bites_equals_no_clipping(precision: Precision) -> None:
    """Updates deferred to the norm give what updates during the backward give."""
    assert_same(run(Case(tiny_config("llama"), precision, 1e9)), baseline(precision, None))


@pytest.mark.parametrize("precision", Precision)
def test_equal_runs_are_equal_and_other_seeds_are_not(precision: Precision) -> None:
    case = Case(tiny_config("llama"), precision, 0.5)
    assert_same(run(case), baseline(precision, 0.5))
    assert len(differing(run(case, seed=2)[1], baseline(precision, 0.5)[1])) > 40


@pytest.mark.parametrize("head_chunk_tokens", [5, 24])
def test_the_heads_chunks_change_only_the_order_of_its_sums(head_chunk_tokens: int) -> None:
    """The loss, and the gradients of the final norm and the LM head, are summed chunk by chunk: 1e-5 in the weights."""
    results, weights = run(replace(Case(tiny_config("llama"), max_grad_norm=0.5), head_chunk_tokens=head_chunk_tokens))
    wanted_results, wanted_weights = baseline(Precision.FP32, 0.5)
    assert [r.loss for r in results] == pytest.approx([r.loss for r in wanted_results], rel=1e-6)
    assert max(differing(weights, wanted_weights).values()) < 1e-5
