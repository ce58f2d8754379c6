"""The streamed step gives the loss, gradients and weights of the whole model in memory with autograd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.messages import IGNORED, Batch
from support.local_compute import LR, local_compute
from support.reference import build_reference, document_mask, train_reference
from support.tiny import random_batch, tiny_config

Tensors = dict[str, torch.Tensor]


def reference_gradients(config: dict[str, Any], weights: Tensors, batch: Batch) -> tuple[float, Tensors]:
    """Loss and gradients of one step by autograd over all sequences at once."""
    model = build_reference(config, weights)
    length = batch.input_ids.shape[-1]
    positions = torch.from_numpy(batch.position_ids.reshape(-1, length)).long()
    logits = model(
        input_ids=torch.from_numpy(batch.input_ids.reshape(-1, length)).long(),
        position_ids=positions,
        attention_mask=None if batch.single_document else document_mask(positions, config.get("sliding_window")),
        use_cache=False,
    ).logits
    targets = torch.from_numpy(batch.targets.reshape(-1)).long()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets, ignore_index=IGNORED, reduction="sum")
    loss = losses / batch.supervised_tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Tensors, want: Tensors, relative: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < relative, f"{name}: relative error {error:.3g}"


def as_micro_batches(batch: Batch, count: int) -> Batch:
    """The same sequences in `count` micro-batches."""
    length = batch.input_ids.shape[-1]
    arrays = {
        name: getattr(batch, name).reshape(count, -1, length) for name in ("input_ids", "targets", "position_ids")
    }
    return dataclasses.replace(batch, **arrays)


def with_lopsided_targets(batch: Batch) -> Batch:
    """One micro-batch with 3 supervised tokens, one with none, the others with all of theirs."""
    targets = batch.targets.copy()
    targets[0, :, 3:] = IGNORED
    targets[0, 1:] = IGNORED
    targets[1] = IGNORED
    return dataclasses.replace(batch, targets=targets, supervised_tokens=int((targets != IGNORED).sum()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_are_those_of_the_whole_batch(family: str, micro_batches: int, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    batch = random_batch(3, micro_batches=4, micro_batch=1, packed=True)
    with local_compute(config) as run:
        loss, want = reference_gradients(config, run.weights(), batch)
        result = run.step(1, as_micro_batches(batch, micro_batches))
        got = run.gradients()
    assert result.loss == pytest.approx(loss, rel=1e-6)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in want.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_tokens_weigh_the_same_whatever_micro_batch_they_are_in(max_grad_norm: float | None) -> None:
    config = tiny_config("llama")
    batch = with_lopsided_targets(random_batch(5, micro_batches=4, micro_batch=2))
    results, gradients = [], []
    for count in (1, 2, 4):
        with local_compute(config, max_grad_norm=max_grad_norm) as run:
            loss, want = reference_gradients(config, run.weights(), batch)
            results.append(run.step(1, as_micro_batches(batch, count)))
            gradients.append(run.gradients())
    for result, got in zip(results, gradients, strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-6)
        assert_close(got, want, 1e-5)


def test_an_accumulated_gradient_is_the_sum_of_its_micro_batches() -> None:
    config = tiny_config("qwen2", tied=True)
    batch = random_batch(7, micro_batches=4, packed=True)
    total: Tensors = {}
    with local_compute(config) as run:
        run.step(1, batch)
        accumulated = run.gradients()
    for index in range(4):
        part = slice(index, index + 1)
        # Divided by the tokens of the whole step, as the part of a step that it is.
        alone = dataclasses.replace(
            batch,
            input_ids=batch.input_ids[part],
            targets=batch.targets[part],
            position_ids=batch.position_ids[part],
        )
        with local_compute(config) as run:
            run.step(1, alone)
            for name, gradient in run.gradients().items():
                total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    assert_close(accumulated, total, 1e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen3", True), ("mistral", False)])
def test_five_steps_train_as_torch_does(family: str, tied: bool, max_grad_norm: float | None) -> None:
    config = tiny_config(family, tied=tied)
    batches = [random_batch(seed, micro_batches=2, packed=seed % 2 == 0) for seed in range(5)]
    with local_compute(config, max_grad_norm=max_grad_norm) as run:
        start = run.weights()
        results = [run.step(step, batch) for step, batch in enumerate(batches, 1)]
        end = run.weights()
    want = train_reference(config, start, batches, lr=LR, max_grad_norm=max_grad_norm)
    np.testing.assert_allclose([result.loss for result in results], want.losses, rtol=1e-6)
    np.testing.assert_allclose([result.grad_norm for result in results], want.grad_norms, rtol=1e-5)
    assert [result.control.applied_steps for result in results] == [1, 2, 3, 4, 5]
    # Adam's first steps are of the size of the rate whatever the gradient: rounding of one near zero is enlarged.
    assert_close(end, want.weights, 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"decoder_slots": 1},
        {"decoder_slots": 5},
        {"outgoing_buffers": 3},
        {"activation_bytes": 1 << 12},
        {"activation_bytes": 1 << 16},
        {"record_spans": False},
    ],
    ids=str,
)
def test_where_things_lie_changes_no_bit(options: dict[str, Any]) -> None:
    config = tiny_config("qwen2")
    batches = [random_batch(seed, micro_batches=4, micro_batch=1, packed=True) for seed in range(3)]
    outcomes = []
    for chosen in ({}, options):
        with local_compute(config, **chosen) as run:
            results = [run.step(step, batch) for step, batch in enumerate(batches, 1)]
            outcomes.append((results, run.moments_and_weights()))
    assert outcomes[0] == outcomes[1]


def test_loss_of_an_evaluation_is_that_of_training_and_changes_nothing() -> None:
    config = tiny_config("llama", tied=True)
    batch = random_batch(1, packed=True)
    outcomes = []
    for evaluations in (0, 2):
        with local_compute(config) as run:
            sums = [run.evaluate(-1 - index, batch) for index in range(evaluations)]
            result = run.step(1, batch)
            outcomes.append((result, run.moments_and_weights()))
            for evaluated in sums:
                assert evaluated.supervised_tokens == batch.supervised_tokens
                assert evaluated.loss_sum / evaluated.supervised_tokens == pytest.approx(result.loss, rel=1e-6)
    assert outcomes[0] == outcomes[1]
