"""Causal attention that never crosses documents, as an attention function that Hugging Face layers call.

An `AttentionContext` is made once for a micro-batch and serves every layer of it, forward and backward. The layers
hand it through to `_attend` as a keyword argument; nothing here belongs to a layer.

Shapes: B sequences, S tokens of a sequence, T = B x S, N attention heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "megatrain"
"""What configurations name our attention function by."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of a micro-batch needs to attend. Lives as long as the micro-batch is computed."""

    position_embeddings: tuple[Tensor, Tensor]
    """Cosines and sines, [B, S, D] each."""
    document_starts: Tensor | None = None
    """int32 [documents + 1] on the device: where each document begins among the T tokens, and T. For the kernel of
    variable-length attention; None where plain causal attention or a mask does."""
    documents: Tensor | None = None
    """int32 [B or 1, S] on the device: the number of each token's document. For masks, which every layer makes anew:
    all micro-batches' would take bytes with the square of the sequence. None where no layer needs one."""
    packed: bool = False
    """Whether layers without a window need a mask too: a sequence holds several documents."""

    def mask(self, window: int | None, length: int) -> Tensor | None:
        """What a layer's tokens see: bool [B or 1, 1, S, S], true where a token (row) may see another.

        Args:
            window: Of the layer, in tokens.
            length: S.

        Returns:
            None where that is plainly all that came before.
        """
        limit = window if window is not None and window < length else None
        if self.documents is None or (limit is None and not self.packed):
            return None
        return _visible(self.documents, limit)


def build_attention_context(
    position_ids_BS: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    windows: Collection[int | None],
    *,
    single_document: bool,
) -> AttentionContext:
    """Prepare attention for a micro-batch.

    Args:
        position_ids_BS: int [B, S] in host memory: a zero begins a document, and so does each sequence. Padding should
            count on as one document: the kernel's cost grows with the number of documents.
        position_embeddings: Cosines and sines [B, S, D] on the device, in the type that the layers compute in.
        windows: The sliding windows of the model's layers (`Family.windows`).
        single_document: Every sequence is one document; `position_ids_BS` is not read.
    """
    device, dtype = position_embeddings[0].device, position_embeddings[0].dtype
    batch, length = position_ids_BS.shape
    limited = {window for window in windows if window is not None and window < length}
    if single_document and not limited:
        return AttentionContext(position_embeddings)
    assert position_ids_BS.device.type == "cpu", "the number of documents would have to be waited for"
    begins_BS = torch.zeros((batch, length), dtype=torch.bool)
    if not single_document:
        begins_BS |= position_ids_BS == 0
    begins_BS[:, 0] = True
    if _kernel_serves(device, dtype):
        starts = torch.cat([begins_BS.flatten().nonzero().flatten(), torch.tensor([batch * length])]).to(torch.int32)
        document_starts = starts.to(device)
        # One compiled layer serves any number of documents.
        torch._dynamo.maybe_mark_dynamic(document_starts, 0)
        return AttentionContext(position_embeddings, document_starts)
    documents_BS = begins_BS.cumsum(1, dtype=torch.int32).to(device)
    return AttentionContext(
        position_embeddings,
        documents=documents_BS[:1] if single_document else documents_BS,
        packed=not single_document,
    )


def _visible(documents_BS: Tensor, window: int | None) -> Tensor:
    """Bool [B, 1, S, S]: same document, not later, and fewer than `window` tokens back."""
    # Compared, not subtracted: differences would be S x S integers.
    positions_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    seen_SS = positions_S[:, None] >= positions_S[None, :]
    if window is not None:
        seen_SS &= positions_S[:, None] < positions_S[None, :] + window
    return (seen_SS & (documents_BS[:, :, None] == documents_BS[:, None, :]))[:, None]


def _find_kernel() -> Callable[..., Tensor] | None:
    """PyTorch's attention over documents of any length, or None where this PyTorch has none with windows."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    kernel: Any = varlen.varlen_attn
    parameters = inspect.signature(kernel).parameters
    if "window_size" not in parameters:
        return None
    # torch 2.11 hands fewer key-value heads to the kernel unasked (measured); later versions want to be told.
    return partial(kernel, enable_gqa=True) if "enable_gqa" in parameters else kernel


_KERNEL = _find_kernel()


def _kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if _KERNEL is None:
        _warn_of_masks()
    return _KERNEL is not None


@lru_cache(maxsize=1)
def _warn_of_masks() -> None:
    _log.warning(
        "torch %s has no variable-length attention with windows: packed documents and sliding windows use masks, whose "
        "time and memory grow with the square of the sequence length; torch 2.11 has it",
        torch.__version__,
    )


def _attend(
    module: nn.Module,
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_context: AttentionContext,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as the layer asks; the signature is that of transformers' attention functions.

    Returns:
        [B, S, N, D], and None for the weights that nobody asks for.
    """
    assert attention_mask is None and dropout == 0.0
    batch, heads, length, size = query_BNSD.shape
    starts = attention_context.document_starts
    if starts is not None:
        assert _KERNEL is not None
        # The kernel counts the tokens to the left; a window counts the token itself too.
        left = -1 if sliding_window is None or sliding_window >= length else sliding_window - 1
        query, key, value = (
            tensor.transpose(1, 2).reshape(batch * length, -1, size) for tensor in (query_BNSD, key_BKSD, value_BKSD)
        )
        out = _KERNEL(query, key, value, starts, starts, length, length, scale=scaling, window_size=(left, 0))
        return out.view(batch, length, heads, size), None
    mask = attention_context.mask(sliding_window, length)
    out_BNSD = F.scaled_dot_product_attention(
        query_BNSD,
        key_BKSD,
        value_BKSD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key_BKSD.shape[1] != heads,
    )
    return out_BNSD.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, _attend)
