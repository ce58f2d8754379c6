"""Updates on the GPU, their state lent and returned over the link, end with the bits of the host's updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from pipeline.compute import ComputeSettings
from support.inline import Case, inline_run
from support.tiny import random_batch, tiny_config
from tiers.layout import Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@dataclass(frozen=True)
class OnGpu(Case):
    def compute_settings(self) -> ComputeSettings:
        return replace(super().compute_settings(), device="cuda", deterministic=True)


def train(case: Case) -> tuple[list[tuple[float, float]], list[bytes]]:
    with inline_run(case) as run:
        results = run.train([random_batch(seed) for seed in range(5)])
        states = [run.arena.view(extent).tobytes() for state in run.map.states for extent in state.values()]
    return [(result.loss, result.grad_norm) for result in results], states


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", Precision)
def test_every_bit_of_weights_and_state_is_the_same(precision: Precision, tied: bool) -> None:
    on_host = OnGpu(tiny_config("qwen2", tied=tied, hidden_size=64, intermediate_size=128), precision, 0.5)
    wanted = train(on_host)
    assert train(replace(on_host, device_updates=(0, 1, 2))) == wanted
    assert train(replace(on_host, device_updates=(0, 1, 2, 3, 4, 5), decoder_slots=5)) == wanted


@pytest.mark.parametrize("kept", [0, 4])
def test_activations_and_lent_state_take_turns_in_the_same_memory(kept: int) -> None:
    apart = OnGpu(tiny_config("qwen2"), Precision.BF16, 0.5, device_updates=(0, 1, 2), kept_layers=kept)
    assert train(replace(apart, in_lent_room=2)) == train(apart)
