"""Resident bf16 training that rounds where the pipeline says it does: all in memory, one operation after another.

A transformers model in bf16, one backward a micro-batch, gradients of the micro-batches added in fp32, the norm taken
of the fp32 sums, the sums rounded to bf16, and AdamW on an fp32 master, one torch operation a rounding. Two gradients
are matrix products or sums over tokens that the pipeline takes in fp32, where autograd rounds each micro-batch's to
bf16: those of the LM head and of the embedding. The loop computes these two by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.messages import IGNORED, Batch
from support.reference import build_reference, document_mask

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1

Tensors = dict[str, Tensor]


def round_half_away(master: Tensor) -> Tensor:
    """The bf16 that is streamed: the high half of the master, ties away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def norm_of(gradients: Tensors) -> float:
    """Global L2 norm of fp32 sums, fp64."""
    return math.sqrt(sum(float(total.double().square().sum()) for total in gradients.values()))


class PlainLoop:
    """A model, its master and its moments, all on one device."""

    def __init__(self, config: dict[str, Any], master: Tensors, *, device: str = "cpu", fp32_products: int = 0) -> None:
        """Take copies of the first values.

        Args:
            config: Of the model.
            master: fp32, by name.
            device: `cpu` or `cuda`.
            fp32_products: Decoder layers, the first ones, whose weight gradients are multiplied straight into their
                fp32 sums, as the pipeline does on CUDA where it recomputes; of others autograd rounds each
                micro-batch's.
        """
        self.config = config
        self.device = torch.device(device)
        self.master = {name: weight.clone().to(self.device) for name, weight in master.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.master.items()}
        with self.device:
            self.model = build_reference(config, self.master).to(torch.bfloat16)
        # What `to` also rounded: the pipeline keeps the frequencies in fp32, as transformers does when it loads bf16.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config).to(self.device)
        self.parameters = dict(self.model.named_parameters())
        for name, weight in self.master.items():
            self.parameters[name].data.copy_(round_half_away(weight))
        self._multiplied = {
            f"model.layers.{index}.{name}.weight": part
            for index, layer in enumerate(self.model.model.layers[:fp32_products])
            for name, part in layer.named_modules()
            if isinstance(part, nn.Linear)
        }

    def gradients(self, batch: Batch) -> tuple[float, Tensors]:
        """Loss and summed fp32 gradients of a step at the present weights."""
        sums = {name: torch.zeros_like(weight) for name, weight in self.master.items()}
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        loss, embedded = 0.0, []
        with self._products_into(sums):
            for arrays in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
                ids, targets, positions = (torch.from_numpy(array).long().to(self.device) for array in arrays)
                part, grad_x = self._micro_batch(
                    ids,
                    targets,
                    positions,
                    1.0 / batch.supervised_tokens,
                    single_document=batch.single_document,
                    sums=sums,
                    head=head,
                )
                loss += part
                embedded.append((ids.view(-1), grad_x))
        # Layer-major: all micro-batches have passed the head before the first one's gradient reaches the embedding,
        # which matters to the last bit where the two share a matrix.
        for index, grad_x in embedded:
            sums["model.embed_tokens.weight"].index_put_((index,), grad_x, accumulate=True)
        return loss, sums

    def update(self, step: int, lr: float, clip: float, gradients: Tensors) -> None:
        """AdamW on the master, each operation rounded to fp32 on its own."""

        def constant(value: float) -> Tensor:
            # On the device: CUDA divides by a number of the host through its reciprocal.
            return torch.tensor(value, dtype=torch.float32, device=self.device)

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

    def _micro_batch(
        self,
        ids: Tensor,
        targets: Tensor,
        positions: Tensor,
        scale: float,
        *,
        single_document: bool,
        sums: Tensors,
        head: str,
    ) -> tuple[float, Tensor]:
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
        _add_product(sums[head], grad_logits.T, flat)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
        assert x.grad is not None
        return float(loss), x.grad.float().view(-1, x.shape[-1])

    @contextmanager
    def _products_into(self, sums: Tensors) -> Iterator[None]:
        """Let the chosen linear layers multiply their weight gradients into `sums` and autograd leave them alone."""

        def multiply(name: str, x: Tensor, output: Tensor) -> None:
            def product(grad: Tensor) -> None:
                _add_product(sums[name], grad.reshape(-1, grad.shape[-1]).T, x.detach().reshape(-1, x.shape[-1]))

            output.register_hook(product)

        hooks = []
        for name, linear in self._multiplied.items():
            linear.weight.requires_grad_(False)
            hooks.append(
                linear.register_forward_hook(lambda _, inputs, output, name=name: multiply(name, inputs[0], output))
            )
        yield
        for hook in hooks:
            hook.remove()


def _add_product(sum_fp32: Tensor, left: Tensor, right: Tensor) -> None:
    if sum_fp32.is_cuda:
        torch.addmm(sum_fp32, left, right, out_dtype=torch.float32, out=sum_fp32)
    else:
        sum_fp32.addmm_(left.float(), right.float())
