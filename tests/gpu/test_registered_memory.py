"""Registering the arena with the GPU takes no memory beyond the arena."""

from __future__ import annotations

import psutil
import pytest
import torch

from pipeline.compute.device import register_host_memory, unregister_host_memory
from tiers.arena import Arena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ARENA_BYTES = 9 << 28
"""1.125 units of 2 GiB: torch's pinned allocator would take 4 GiB."""


def test_registered_memory_is_the_arena_and_nothing_else() -> None:
    """FAULTS B73."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    with Arena.create(ARENA_BYTES) as arena:
        before = psutil.virtual_memory().available
        register_host_memory(arena.address, ARENA_BYTES)
        try:
            taken = before - psutil.virtual_memory().available
        finally:
            unregister_host_memory(arena.address)
    assert taken < 0.05 * ARENA_BYTES, f"registering {ARENA_BYTES} bytes took {taken} more"
