"""bf16 against a plain loop that rounds where the pipeline says it does.

The loop: a transformers model in bf16, one backward a micro-batch, gradients of the micro-batches added in fp32, the
norm taken of the fp32 sums, the sums rounded to bf16, and AdamW on an fp32 master, one torch operation a rounding.
Two gradients are matrix products or sums over tokens that the pipeline takes in fp32, where autograd rounds each
micro-batch's to bf16: those of the LM head and of the embedding. The loop computes these two by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.messages import IGNORED, Batch
from support.inline import Case, inline_run
from support.reference import build_reference, document_mask
from support.tiny import FAMILIES, random_batch, tiny_config
from tiers.layout import ElementType, Precision

STEPS = 10
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1

Tensors = dict[str, torch.Tensor]


def round_half_away(master: torch.Tensor) -> torch.Tensor:
    """The bf16 that is streamed: the high half of the master, ties away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class PlainLoop:
    """Everything in memory, one operation after another."""

    def __init__(self, config: dict[str, Any], master: Tensors) -> None:
        self.config = config
        self.master = {name: weight.clone() for name, weight in master.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in master.items()}
        self.model = build_reference(config, master).to(torch.bfloat16)
        # What `to` also rounded: the pipeline keeps the frequencies in fp32, as transformers does when it loads bf16.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config)
        self.parameters = dict(self.model.named_parameters())
        for name, weight in master.items():
            self.parameters[name].data.copy_(round_half_away(weight))

    def gradients(self, batch: Batch) -> tuple[float, Tensors]:
        """Loss and summed fp32 gradients of a step at the present weights."""
        sums = {name: torch.zeros_like(weight) for name, weight in self.master.items()}
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        loss, embedded = 0.0, []
        for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
            part, grad_x = self._micro_batch(
                torch.from_numpy(ids).long(),
                torch.from_numpy(targets).long(),
                torch.from_numpy(positions).long(),
                1.0 / batch.supervised_tokens,
                single_document=batch.single_document,
                sums=sums,
                head=head,
            )
            loss += part
            embedded.append((torch.from_numpy(ids).long().view(-1), grad_x))
        # Layer-major: all micro-batches have passed the head before the first one's gradient reaches the embedding,
        # which matters to the last bit where the two share a matrix.
        for index, grad_x in embedded:
            sums["model.embed_tokens.weight"].index_put_((index,), grad_x, accumulate=True)
        return loss, sums

    def _micro_batch(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        *,
        single_document: bool,
        sums: Tensors,
        head: str,
    ) -> tuple[float, torch.Tensor]:
        self.model.zero_grad()
        embedding, matrix = self.parameters["model.embed_tokens.weight"].detach(), self.parameters[head].detach()
        x = F.embedding(ids, embedding).requires_grad_()
        mask = None if single_document else document_mask(positions, self.config.get("sliding_window"))
        hidden = self.model.model(
            inputs_embeds=x, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state
        flat = hidden.detach().view(-1, hidden.shape[-1])
        with torch.no_grad():
            # Autograd's own gradient is one unit of fp32 off now and then, which is another bf16 once in a thousand.
            log_probs = F.log_softmax(F.linear(flat, matrix), dim=-1, dtype=torch.float32)
            supervised = torch.nonzero(targets.view(-1) != IGNORED).view(-1)
            index = targets.view(-1)[supervised]
            loss = -log_probs[supervised, index].sum() * scale
            grad_logits = torch.zeros_like(log_probs)
            grad_logits[supervised] = log_probs[supervised].exp() * scale
            grad_logits[supervised, index] -= scale
            grad_logits = grad_logits.bfloat16()
        hidden.backward((grad_logits @ matrix).view_as(hidden))
        sums[head].addmm_(grad_logits.float().T, flat.float())
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
        assert x.grad is not None
        return float(loss), x.grad.float().view(-1, x.shape[-1])

    def update(self, step: int, lr: float, clip: float, gradients: Tensors) -> None:
        """AdamW on the master, each operation rounded to fp32 on its own."""

        def constant(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.float32)

        beta1, beta2 = BETAS
        size, root = constant(lr / (1 - beta1**step)), constant(math.sqrt(1 - beta2**step))
        for name, w in self.master.items():
            g = gradients[name].float() * constant(clip)
            m, v = self.moments[name]
            w *= constant(1 - lr * DECAY if w.ndim >= 2 else 1.0)
            m += (g - m) * constant(1 - beta1)
            v.mul_(constant(beta2)).add_((g * g) * constant(1 - beta2))
            # By way of fp64 the root is correctly rounded; PyTorch's own fp32 root is not on every CPU.
            w -= (size * m) / (v.double().sqrt().float() / root + constant(EPS))
            self.parameters[name].data.copy_(round_half_away(w))


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
            norm = math.sqrt(sum(float(total.double().square().sum()) for total in sums.values()))
            assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-6)
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
