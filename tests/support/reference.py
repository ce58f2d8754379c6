"""The trusted simple implementation: a transformers model in memory, autograd and torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.messages import IGNORED, Batch
from pipeline.updates.learning_rate import LearningRate


@dataclass
class Trained:
    """What a reference run leaves."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def build_reference(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A transformers model in fp32 with the given weights, every one of them accounted for."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), attn_implementation="sdpa", dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set()), missing
    model.tie_weights()
    return model.train()


def document_mask(position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Boolean [B, 1, S, S]: a token sees those before it in its own document, the nearest `window` of them."""
    document = (position_ids == 0).cumsum(-1)
    index = torch.arange(position_ids.shape[-1])
    causal = index[:, None] >= index[None, :]
    if window is not None:
        causal &= index[:, None] - index[None, :] < window
    return (causal & (document[:, :, None] == document[:, None, :]))[:, None]


def train_reference(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    batches: Sequence[Batch],
    *,
    lr: LearningRate,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 1.0,
) -> Trained:
    """Train on `batches`, one optimizer step each, micro-batches accumulated by autograd."""
    model = build_reference(config, weights)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=lr.at(1),
        betas=betas,
        eps=eps,
        foreach=False,
    )
    losses, grad_norms = [], []
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr.at(step)
        optimizer.zero_grad()
        total = 0.0
        for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
            position_ids = torch.from_numpy(positions).long()
            mask = None if batch.single_document else document_mask(position_ids, config.get("sliding_window"))
            logits = model(
                input_ids=torch.from_numpy(ids).long(), position_ids=position_ids, attention_mask=mask, use_cache=False
            ).logits
            loss = (
                torch.nn.functional.cross_entropy(
                    logits.view(-1, logits.shape[-1]),
                    torch.from_numpy(targets).long().view(-1),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                / batch.supervised_tokens
            )
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        losses.append(total)
        grad_norms.append(float(norm))
        optimizer.step()
    return Trained(losses, grad_norms, {name: p.detach().clone() for name, p in model.named_parameters()})
