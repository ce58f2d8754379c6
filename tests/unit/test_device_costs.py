from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from pipeline.memory.shapes import ComputeShape, StepShape
from pipeline.placement import MemoryBudget, place
from pipeline.prediction.costs import CostModel
from pipeline.prediction.device_costs import DeviceCosts
from pipeline.prediction.hardware import SHIPPED, load_hardware
from pipeline.prediction.layer_traffic import backward_elements, forward_elements, recompute_elements
from pipeline.prediction.simulate import simulate
from pipeline.recipe import load_recipe
from pipeline.recipe_placement import request_of, shape_of
from pipeline.step.operations import Op
from tasks.probe_device import LONG, _endless
from tiers.layout import LayerLayout

H200 = load_hardware(SHIPPED / "h200-measured.toml")
BENCH = SHIPPED.parent / "bench"
ROOMY = MemoryBudget(2**50, 2**50, 2**50)
MIXTURE = ComputeShape(
    hidden_size=2880,
    intermediate_size=2880,
    query_size=4096,
    kv_size=512,
    head_size=64,
    vocab_size=201088,
    num_experts=128,
    experts_per_token=4,
)


@cache
def costs(shape: str, kept_layers: int = 0) -> CostModel:
    """Of a bench recipe, 65,536 tokens a step, with so many layers kept whatever memory that takes."""
    recipe = load_recipe(BENCH / f"qwen2.5-{shape}.toml", [f"memory.kept_layers={kept_layers}"])
    request = request_of(recipe, shape_of(recipe), cuda=True, optimizer_actors=4)
    placement = place(request, ROOMY)
    assert placement.schedule.kept_layers == kept_layers
    return CostModel(placement, request.compute, placement.step, H200)


def layer_costs(shape: str) -> tuple[DeviceCosts, LayerLayout]:
    """One micro-batch of 16,384 tokens, and a decoder layer that it passes."""
    model = costs(shape)
    step = replace(model.step, sequences=model.step.micro_batch)
    return DeviceCosts(model.compute, step, H200.device, 2), model.placement.tier.model.layers[1]


@pytest.mark.parametrize(
    ("shape", "kept_layers", "measured_s"),
    [("7b", 0, 5.637), ("7b", 12, 5.237), ("7b", 15, 5.146), ("7b", 18, 4.961), ("3b", 28, 2.366), ("3b", 33, 2.228)],
)
def test_predicts_the_steps_that_were_measured_on_an_h200_within_4_percent(
    shape: str, kept_layers: int, measured_s: float
) -> None:
    """Wide layers and narrow ones, recomputed and kept: one rate of products for all."""
    assert simulate(costs(shape, kept_layers)).step_s == pytest.approx(measured_s, rel=0.04)


@pytest.mark.parametrize(("kept", "measured_s"), [(True, 0.0375), (False, 0.0456)])
def test_predicts_a_layer_that_was_measured_alone_within_4_percent(kept: bool, measured_s: float) -> None:
    device, layer = layer_costs("7b")
    seconds = sum(device.seconds(op, layer, kept=kept, leaves=False) for op in (Op.FORWARD, Op.BACKWARD))
    assert seconds == pytest.approx(measured_s, rel=0.04)


def test_predicts_a_layer_with_one_long_sequence_that_was_measured_alone_within_4_percent() -> None:
    """Recompute and backward of 131,072 tokens; with the rate of short sequences it would be 2.3 times that."""
    model = costs("7b-one-131k")
    device, layer = DeviceCosts(model.compute, model.step, H200.device, 2), model.placement.tier.model.layers[1]
    assert device.seconds(Op.BACKWARD, layer, kept=False, leaves=False) == pytest.approx(1.042, rel=0.04)


def test_attention_grows_faster_with_the_sequence_where_that_is_known() -> None:
    h200, flat = H200.device, replace(H200.device, long_attention_efficiency=0.0)
    lengths = (128, 1024, 2048, 16_384, 1 << 20)
    rates = [h200.attention_efficiency_over(keys) for keys in lengths]
    assert rates[0] == rates[1] == pytest.approx(0.25) and rates[-1] == pytest.approx(0.70, rel=0.01)
    assert all(shorter < longer for shorter, longer in pairwise(rates[1:]))
    assert {flat.attention_efficiency_over(keys) for keys in lengths} == {0.25}


def test_the_probe_finds_the_rate_of_endless_sequences_that_its_long_one_follows_from() -> None:
    long = H200.device.attention_efficiency_over(LONG)
    assert 0.6 < long < 0.70 and _endless(0.25, long) == pytest.approx(0.70)
    assert _endless(0.5, 0.5) == _endless(0.5, 0.4) == _endless(0.001, 0.9) == 0.0, "not known"


def test_what_is_no_product_takes_a_larger_share_of_a_narrower_layer() -> None:
    def share(shape: str) -> float:
        device, layer = layer_costs(shape)
        forward = device.seconds(Op.FORWARD, layer, kept=False, leaves=False)
        return 1 - 2.0 * layer.num_parameters * device.step.tokens / (788e12 * 0.905) / forward

    assert 0.08 < share("7b") < share("3b") < share("0.5b")


def test_a_faster_memory_shortens_a_layer_by_the_traffic_that_it_has() -> None:
    device, layer = layer_costs("3b")
    faster = replace(device, device=replace(H200.device, memory_gbps=2 * H200.device.memory_gbps))
    saved = device.seconds(Op.FORWARD, layer, kept=False, leaves=False) - faster.seconds(
        Op.FORWARD, layer, kept=False, leaves=False
    )
    moved_bytes = 2 * forward_elements(device.compute) * device.step.tokens
    assert saved == pytest.approx(moved_bytes / H200.device.memory_gbps / 2e9)


def test_a_layer_that_is_kept_moves_less_than_one_that_is_recomputed_and_experts_move_more_than_one_network() -> None:
    dense = replace(MIXTURE, intermediate_size=4 * 2880, num_experts=1, experts_per_token=1)
    for compute in (MIXTURE, dense):
        recomputed = backward_elements(compute, kept=False) + recompute_elements(compute)
        assert backward_elements(compute, kept=True) < recomputed
        assert recompute_elements(compute) < forward_elements(compute)
    assert forward_elements(MIXTURE) - forward_elements(dense) == 11 * 2880
    assert backward_elements(MIXTURE, kept=False) - backward_elements(dense, kept=False) == 14 * 2880


def test_attention_takes_no_less_than_its_traffic_however_short_its_window() -> None:
    device, layer = layer_costs("3b")

    def forward(window: int | None) -> float:
        windowed = replace(device, compute=replace(device.compute, attention_window=window))
        return windowed.seconds(Op.FORWARD, layer, kept=False, leaves=False)

    assert forward(1) == forward(32) < forward(512) < forward(None)


def test_longer_sequences_cost_attention_in_proportion() -> None:
    device, layer = layer_costs("3b")
    lengths = [StepShape(1024 * factor, 16 // factor, 16 // factor) for factor in (1, 2, 4)]
    short, middle, long = (
        replace(device, step=step).seconds(Op.BACKWARD, layer, kept=True, leaves=False) for step in lengths
    )
    assert long - middle == pytest.approx(2 * (middle - short), rel=1e-6)
