from __future__ import annotations

import pytest

from pipeline.device_footprint import device_terms
from pipeline.families import load_model_spec, model_layout
from pipeline.footprint import GIB, total
from pipeline.host_footprint import process_terms
from pipeline.shapes import ComputeShape, ProcessShape, StepShape
from tiers.layout import ModelLayout, Precision

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


@pytest.mark.parametrize(("name", "sequences", "measured_gib"), [("3b", 64, 18.1), ("7b", 64, 24.9), ("7b", 128, 38.1)])
def test_device_account_is_not_below_the_prototype_and_at_most_5_percent_above(
    name: str, sequences: int, measured_gib: float
) -> None:
    """The prototype held one vocabulary slot and one set of boundary activations more; its peak knew no context."""
    layout, compute = model(name)
    step = StepShape(1024, sequences, 16)
    terms = device_terms(layout, compute, step, 2, decoder_slots=2)
    more = layout.layers[0].numel * 2 + step.tokens * compute.hidden_size * 2
    predicted = total(term for term in terms if term.name != "CUDA context") + more
    assert measured_gib * GIB <= predicted <= 1.05 * measured_gib * GIB


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
