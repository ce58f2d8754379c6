"""Final norm, LM head and cross-entropy in chunks of tokens, forward and backward at once.

Called by the compute actor for each micro-batch. The logits of all tokens never exist: a chunk's are made, turned into
their own gradient and used up before the next chunk. Nothing here waits for the device.

Shapes: B sequences, S tokens, H hidden size, V vocabulary, T = B x S tokens, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.messages import IGNORED

CHUNK_TOKENS = 4096
"""Enough rows to keep the GEMMs at full speed; with 152,064 words a chunk's logits take 1.2 GB in bf16."""


class Head:
    """Computes the loss and its gradients. Holds no tensors and may be shared."""

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS, compile: bool = False, backend: str = "inductor") -> None:
        """Choose the size of a chunk.

        Args:
            chunk_tokens: Memory grows with it: 11.5 bytes x V a token, 4.5 when compiled (bf16, measured on an H200).
                An evaluation, which is not compiled, takes 10, and half the tokens at a time where training is.
            compile: Fuse the elementwise part of a chunk, so that its fp32 logits never exist in memory.
            backend: Of `torch.compile`.
        """
        assert chunk_tokens > 0
        self._chunk_tokens = chunk_tokens
        # The plan has room for what training holds.
        self._evaluated_tokens = max(1, chunk_tokens // 2) if compile else chunk_tokens
        self._differentiate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _loss_and_logit_gradient
        if compile:
            self._differentiate = torch.compile(
                _loss_and_logit_gradient, backend=backend, dynamic=False, fullgraph=True
            )

    def loss_and_backward(
        self,
        x_BSH: Tensor,
        targets_BS: Tensor,
        norm: nn.Module,
        weight_VH: Tensor,
        scale: float,
        norm_grad_fp32: Tensor,
        weight_grad_fp32: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch and go back to the input of the final norm.

        Args:
            x_BSH: Output of the last decoder layer.
            targets_BS: int on the device of `x_BSH`; IGNORED where a token has no target.
            norm: The final norm, its one parameter [H] bound.
            weight_VH: LM head, or the embedding matrix where tied.
            scale: What every token's loss is multiplied by: 1 / supervised tokens of the whole step.
            norm_grad_fp32: [H] fp32; the norm's gradient is added to it.
            weight_grad_fp32: [V, H] fp32; the LM head's gradient is added to it.

        Returns:
            Scaled sum of the token losses, fp32 without dimensions, on the device; and the gradient by `x_BSH`.
        """
        (norm_weight,) = norm.parameters()
        x_TH, targets_T = x_BSH.detach().reshape(-1, x_BSH.shape[-1]), targets_BS.reshape(-1)
        grad_x_TH = torch.empty_like(x_TH)
        # As a tensor the scale is no constant of the compiled chunk, which it would otherwise be compiled anew for.
        scale_fp32 = torch.full((), scale, dtype=torch.float32, device=x_TH.device)
        loss = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        for start in range(0, x_TH.shape[0], self._chunk_tokens):
            chunk = slice(start, start + self._chunk_tokens)
            with torch.enable_grad():
                x_CH = x_TH[chunk].requires_grad_()
                normed_CH = norm(x_CH)
            with torch.no_grad():
                hidden_CH = normed_CH.detach()
                logits_CV = F.linear(hidden_CH, weight_VH)
                chunk_loss, grad_logits_CV = self._differentiate(logits_CV, targets_T[chunk], scale_fp32)
                del logits_CV
                loss += chunk_loss
                grad_normed_CH = grad_logits_CV @ weight_VH
                add_product(weight_grad_fp32, grad_logits_CV.T, hidden_CH)
                del grad_logits_CV
            grad_x_CH, grad_norm_H = torch.autograd.grad(normed_CH, (x_CH, norm_weight), grad_normed_CH)
            grad_x_TH[chunk] = grad_x_CH
            norm_grad_fp32 += grad_norm_H
        return loss, grad_x_TH.view_as(x_BSH)

    def loss(self, x_BSH: Tensor, targets_BS: Tensor, norm: nn.Module, weight_VH: Tensor) -> Tensor:
        """Compute the unscaled sum of token losses for evaluation: fp32 without dimensions, on the device.

        Arguments are those of `loss_and_backward`. Without any target the sum is 0.
        """
        x_TH, targets_T = x_BSH.reshape(-1, x_BSH.shape[-1]), targets_BS.reshape(-1)
        loss_sum = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        with torch.no_grad():
            for start in range(0, x_TH.shape[0], self._evaluated_tokens):
                chunk = slice(start, start + self._evaluated_tokens)
                log_probs_CV = _log_probs(F.linear(norm(x_TH[chunk]), weight_VH))
                loss_sum += _token_losses(log_probs_CV, targets_T[chunk]).sum()
                del log_probs_CV  # before the next chunk's
        return loss_sum


def _loss_and_logit_gradient(logits_CV: Tensor, targets_C: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a chunk in fp32, and its gradient by the logits in their own type.

    The order of operations is that of PyTorch's `log_softmax`, `nll_loss` and their backward: in fp32 one chunk gives
    the same loss, and gradients that differ in the last bit at most.
    """
    log_probs_CV = _log_probs(logits_CV)
    loss = _token_losses(log_probs_CV, targets_C).sum() * scale
    weight_C1 = torch.where(targets_C != IGNORED, scale, 0.0)[:, None]
    # A comparison fuses with its neighbours when compiled; a scatter would write the fp32 gradient to memory first.
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    # In place, for when it is not compiled: the probabilities' memory becomes the gradient's.
    grad_CV = log_probs_CV.exp_().mul_(weight_C1)
    grad_CV.sub_(torch.where(is_target_CV, weight_C1, 0.0))
    return loss, grad_CV.to(logits_CV.dtype)


def _log_probs(logits_CV: Tensor) -> Tensor:
    """Log-softmax in fp32. PyTorch copies bf16 logits to fp32 first; compiled, it reads them in their own type."""
    return F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)


def _token_losses(log_probs_CV: Tensor, targets_C: Tensor) -> Tensor:
    """fp32 [C]: zero where a token has no target."""
    supervised_C = targets_C != IGNORED
    index_C1 = torch.where(supervised_C, targets_C, 0).long()[:, None]
    return torch.where(supervised_C, -log_probs_CV.gather(1, index_C1)[:, 0], 0.0)


def add_product(sum_fp32: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `sum_fp32` without rounding the product to 16 bits."""
    if left.dtype == torch.float32:
        sum_fp32.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(sum_fp32, left, right, out_dtype=torch.float32, out=sum_fp32)
    else:  # the CPU has no product of 16-bit matrices into fp32
        sum_fp32.addmm_(left.float(), right.float())
