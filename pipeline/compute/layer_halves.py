"""A decoder layer as two halves: one mixes tokens, the other does not and may therefore run on some tokens at a time.

Either half is the Hugging Face layer itself, whose other residual block is replaced by one that adds zero: no maths is
written anew. Of one long sequence the feed-forward network's activations are most of what a layer holds while it works;
chunk by chunk they no longer grow with the sequence. Used by `template`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pipeline.families.registry import LayerBlocks

CHUNK_MULTIPLE = 128
"""Rows that the tiles of a matrix product have: other chunks leave some of the last tile idle."""


class _AddsNothing(nn.Module):
    """Stands for a feed-forward network: zeros [..., H] that take no memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand_as(x)


class _AttendsToNothing(nn.Module):
    """Stands for an attention block: zeros [..., H] that take no memory, and no attention weights."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states.new_zeros(()).expand_as(hidden_states), None


def keep_attention(layer: nn.Module, blocks: LayerBlocks) -> nn.Module:
    """Leave of a decoder layer `m = x + attention(norm(x))`; changes it in place and returns it."""
    layer.set_submodule(blocks.feed_forward_norm, nn.Identity())
    layer.set_submodule(blocks.feed_forward, _AddsNothing())
    return layer


def keep_feed_forward(layer: nn.Module, blocks: LayerBlocks) -> nn.Module:
    """Leave of a decoder layer `y = m + feed_forward(norm(m))`; changes it in place and returns it."""
    layer.set_submodule(blocks.attention_norm, nn.Identity())
    layer.set_submodule(blocks.attention, _AttendsToNothing())
    return layer


def chunks_of(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Cut `tokens` into chunks of at most `chunk_tokens`: all of one size, save that the last may be smaller.

    As few as possible and then as equal as possible, so that a compiled half meets one shape, at most two.
    """
    count = -(-tokens // chunk_tokens)
    size = -(-tokens // count)
    size = min(chunk_tokens, -(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
