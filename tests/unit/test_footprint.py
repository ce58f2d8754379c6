from __future__ import annotations

import pytest

from pipeline.families import load_model_spec, model_layout
from pipeline.memory.device_footprint import NOT_IN_TORCH_PEAK, device_terms
from pipeline.memory.footprint import GIB, total
from pipeline.memory.homes import homes
from pipeline.memory.host_footprint import NOT_IN_HELD_BYTES, arena_terms, process_terms
from pipeline.memory.shapes import ComputeShape, ProcessShape, StepShape
from tiers.layout import ElementType, ModelLayout, Precision, TierPlan

QWEN = {"model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
SHAPES = {
    "3b": QWEN
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 2},
    "7b": QWEN | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}


def model(name: str) -> tuple[ModelLayout, ComputeShape]:
    spec = load_model_spec(SHAPES[name], Precision.BF16)
    return model_layout(spec), ComputeShape.of_config(spec.config.to_dict())


def test_device_account_is_not_below_the_measured_peak_and_at_most_5_percent_above() -> None:
    """FAULTS B140. BENCHMARKS.md, 7B on an H200; torch's peak knows neither context nor what its allocator wastes."""
    layout, compute = model("7b")
    terms = device_terms(layout, compute, StepShape(1024, 64, 16), 2, decoder_slots=2)
    predicted = total(term for term in terms if term.name not in NOT_IN_TORCH_PEAK)
    assert 21.9 * GIB <= predicted <= 1.05 * 21.9 * GIB


def test_host_account_is_not_below_what_7b_held_and_at_most_5_percent_above() -> None:
    """FAULTS B140. BENCHMARKS.md: the arena with the private memory of driver and actors, 104.5 GiB on an H200."""
    layout, _ = model("7b")
    tier = TierPlan(layout, homes(layout, clip=True, state=[], weights=[], staging_slots=3), ElementType.BFLOAT16)
    terms = [*arena_terms(tier), *process_terms(0, ProcessShape(optimizer_actors=4))]
    predicted = total(term for term in terms if term.name not in NOT_IN_HELD_BYTES)
    assert 104.5 * GIB <= predicted <= 1.05 * 104.5 * GIB


def test_depth_costs_the_device_boundary_activations_alone() -> None:
    step = StepShape(1024, 64, 4)
    accounts = []
    for layers in (28, 56):
        spec = load_model_spec(SHAPES["7b"] | {"num_hidden_layers": layers}, Precision.BF16)
        compute = ComputeShape.of_config(spec.config.to_dict())
        terms = device_terms(model_layout(spec), compute, step, 2, decoder_slots=2, spilled_boundaries=layers)
        accounts.append(total(terms))
    assert accounts[0] == accounts[1]


def test_a_tied_matrix_keeps_its_accumulator_through_the_decoder_layers() -> None:
    spec = load_model_spec(SHAPES["3b"] | {"tie_word_embeddings": True}, Precision.BF16)
    tied, compute = model_layout(spec), ComputeShape.of_config(spec.config.to_dict())
    terms = {term.name: term.num_bytes for term in device_terms(tied, compute, StepShape(64, 1, 1), 2, decoder_slots=2)}
    embedding, decoder = tied.layers[0].numel, tied.layers[1].numel
    assert terms["gradient accumulators"] == 4 * (embedding + decoder)


def test_processes_grow_with_the_actors_and_page_tables_with_the_arena() -> None:
    few, many = (total(process_terms(0, ProcessShape(actors))) for actors in (1, 15))
    assert many > few
    assert total(process_terms(100 * GIB, ProcessShape(1))) - few == 100 * GIB // 128


def test_a_mixture_multiplies_a_token_with_the_experts_it_is_routed_to() -> None:
    shape = ComputeShape.of_config(
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    )
    assert (shape.num_experts, shape.experts_per_token) == (8, 2)


def test_a_size_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        ComputeShape.of_config({"hidden_size": "64", "num_attention_heads": 4, "vocab_size": 100})
