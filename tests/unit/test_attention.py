"""What a token may see, and when plain causal attention is enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.families.attention import AttentionContext, build_attention_context

TABLES = (torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))


def context_of(positions: Tensor, windows: set[int | None], *, single_document: bool) -> AttentionContext:
    return build_attention_context(positions, TABLES, windows, single_document=single_document)


def seen_by_definition(positions: Tensor, window: int | None) -> Tensor:
    """Token by token: same document, not later, fewer than `window` back."""
    batch, length = positions.shape
    seen = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for row in range(batch):
        for query in range(length):
            for back in range(int(positions[row, query]) + 1):
                if window is None or back < window:
                    seen[row, 0, query, query - back] = True
    return seen


PACKED = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 100])
def test_a_mask_shows_a_document_its_own_past_within_the_window(window: int | None) -> None:
    context = context_of(PACKED, {window}, single_document=False)
    mask = context.mask(window, 8)
    assert mask is not None and torch.equal(mask, seen_by_definition(PACKED, window))


def test_layers_of_several_windows_share_one_context() -> None:
    context = context_of(PACKED, {None, 3, 50}, single_document=False)
    for window in (None, 3, 50):
        mask = context.mask(window, 8)
        assert mask is not None and torch.equal(mask, seen_by_definition(PACKED, window))


def test_single_documents_need_no_mask_unless_a_window_is_shorter() -> None:
    positions = torch.arange(8).expand(2, 8)
    without = context_of(positions, {None, 8}, single_document=True)
    assert without.documents is None and without.mask(8, 8) is None
    context = context_of(positions, {None, 3}, single_document=True)
    mask = context.mask(3, 8)
    assert mask is not None and torch.equal(mask, seen_by_definition(positions[:1], 3))
    assert context.mask(None, 8) is context.mask(8, 8) is None


def test_a_sequence_that_begins_inside_a_document_does_not_see_the_sequence_before_it() -> None:
    cut = torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3]])
    mask = context_of(cut, {None}, single_document=False).mask(None, 8)
    assert mask is not None and torch.equal(mask, seen_by_definition(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), None))
