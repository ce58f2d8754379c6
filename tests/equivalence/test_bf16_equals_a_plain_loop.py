"""bf16 against a plain loop that rounds where the pipeline says it does: `support.plain_loop`."""

from __future__ import annotations

import pytest
import torch

from support.inline import Case, inline_run
from support.plain_loop import PlainLoop, norm_of
from support.tiny import FAMILIES, random_batch, tiny_config
from tiers.layout import ElementType, Precision

STEPS = 10


@pytest.mark.parametrize(("packed", "max_grad_norm"), [(False, None), (True, 0.5)], ids=["whole", "packed-clipped"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_trains_as_a_plain_loop_with_the_same_rounding(
    family: str, tied: bool, packed: bool, max_grad_norm: float | None
) -> None:
    """Bitwise in every gradient and in the master after 10 steps.

    Under a mask transformers repeats the key and value heads and adds their gradients up in bf16, where the pipeline's
    kernel shares them: with as many of them as query heads there is nothing to repeat.
    """
    config = tiny_config(family, tied=tied)
    if packed or family == "mistral":
        config["num_key_value_heads"] = config["num_attention_heads"]
    assert_trains_as_the_loop(Case(config, Precision.BF16, max_grad_norm), packed=packed)


def test_fp32_gradient_slots_give_the_optimizer_the_unrounded_sums() -> None:
    """B06: `precision.gradients` is honoured."""
    assert_trains_as_the_loop(
        Case(tiny_config("llama"), Precision.BF16, 0.5, gradients=ElementType.FLOAT32), packed=False
    )


def assert_trains_as_the_loop(case: Case, *, packed: bool) -> None:
    with inline_run(case) as run:
        loop = PlainLoop(case.config, run.weights())
        for step in range(1, STEPS + 1):
            batch = random_batch(step, micro_batches=3, packed=packed)
            result = run.step(step, batch)
            loss, sums = loop.gradients(batch)
            assert (result.loss, result.grad_norm) == pytest.approx((loss, norm_of(sums)), rel=1e-6)
            fp32 = case.gradients is ElementType.FLOAT32
            gradients = sums if fp32 else {name: total.bfloat16() for name, total in sums.items()}
            # The pipeline's coefficient: the norms are sums in different orders.
            loop.update(step, result.control.lr, result.control.clip_coefficient, gradients)
        trained = run.weights()
    apart = {
        name: float((trained[name] - weight).abs().max())
        for name, weight in loop.master.items()
        if not torch.equal(trained[name].view(torch.int32), weight.view(torch.int32))
    }
    assert not apart
