"""The flagship: the streamed pipeline trains as transformers with torch.optim.AdamW does.

Both run in fp32 on the CPU. Losses agree to 1e-6 relative and weights to 1e-5 absolute after 10 steps at lr 1e-3: the
sums of the chunked head and of the accumulated micro-batches are ordered differently, nothing else differs.
"""

from __future__ import annotations

import pytest
import torch

from support.inline import Case, inline_run
from support.reference import train_reference
from support.tiny import FAMILIES, random_batch, tiny_config

STEPS = 10


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 4], ids=["ga1", "ga4"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_transformers_and_torch_adamw_do(
    family: str, tied: bool, micro_batches: int, max_grad_norm: float | None, packed: bool
) -> None:
    case = Case(tiny_config(family, tied=tied), max_grad_norm=max_grad_norm)
    batches = [random_batch(seed, micro_batches=micro_batches, packed=packed) for seed in range(STEPS)]
    with inline_run(case) as run:
        initial = run.weights()
        results = run.train(batches)
        trained = run.weights()
    reference = train_reference(case.config, initial, batches, lr=case.lr, max_grad_norm=max_grad_norm)
    assert [result.loss for result in results] == pytest.approx(reference.losses, rel=1e-6)
    assert [result.grad_norm for result in results] == pytest.approx(reference.grad_norms, rel=1e-6)
    assert set(reference.weights) == set(trained)
    apart = {name: float((trained[name] - weight).abs().max()) for name, weight in reference.weights.items()}
    worst = max(apart, key=lambda name: apart[name])
    assert apart[worst] < 1e-5, f"{worst} is {apart[worst]:.2e} apart"
    moved = {name: float((trained[name] - weight).abs().max()) for name, weight in initial.items()}
    assert min(moved.values()) > 1e-5, f"{min(moved, key=lambda name: moved[name])} did not train"


def test_accumulation_with_uneven_token_counts_equals_one_large_batch() -> None:
    """B01, B02, B15: 3 supervised tokens in one micro-batch and all of them in the other."""
    config = tiny_config("llama")
    batch = random_batch(7, micro_batches=2, micro_batch=1, packed=True)
    batch.targets[0].reshape(-1)[3:] = -100
    supervised = int((batch.targets != -100).sum())
    split = type(batch)(batch.input_ids, batch.targets, batch.position_ids, batch.tokens, supervised, False)
    joined = type(batch)(
        *(array.reshape(1, 2, -1) for array in (batch.input_ids, batch.targets, batch.position_ids)),
        batch.tokens,
        supervised,
        False,
    )
    outcomes = []
    for variant in (split, joined):
        with inline_run(Case(config)) as run:
            result = run.step(1, variant)
            outcomes.append((result.loss, result.grad_norm, run.weights()))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-6)
    assert outcomes[0][1] == pytest.approx(outcomes[1][1], rel=1e-6)
    for name, weight in outcomes[0][2].items():
        torch.testing.assert_close(weight, outcomes[1][2][name], atol=1e-6, rtol=0, msg=name)
