"""Configurations are vetted, layouts are read off the real modules, and FLOPs follow the stated formula."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from pipeline.errors import UnsupportedModelError
from pipeline.families import family_of, load_model_spec, matmul_parameters, model_flops_per_token, model_layout
from tiers.layout import TENSOR_ALIGNMENT, InitKind, LayerKind, Precision

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(model_type: str, **changes: object) -> dict[str, object]:
    return {"model_type": model_type, **SIZES, **changes}


def load(model_type: str, **changes: object):  # type: ignore[no-untyped-def]
    return load_model_spec(config(model_type, **changes), Precision.BF16)


def test_a_published_config_file_is_read_with_its_old_and_inert_fields(tmp_path: Path) -> None:
    published = config(
        "qwen2",
        architectures=["Qwen2ForCausalLM"],
        torch_dtype="bfloat16",
        transformers_version="4.40.1",
        use_cache=True,
        use_mrope=False,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=3,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        temperature=0.7,
        attention_dropout=0.0,
        _name_or_path="somewhere",
    )
    (tmp_path / "config.json").write_text(json.dumps(published))
    spec = load_model_spec(tmp_path, Precision.BF16)
    assert (spec.model_type, spec.hidden_size, spec.vocab_size, spec.num_decoder_layers) == ("qwen2", 32, 101, 3)
    assert spec.tied
    assert family_of(spec).windows == {None}
    assert spec.config.rope_parameters["rope_theta"] == 1000000.0
    assert json.loads(spec.config_json) == published, "an export writes back what was read"


def test_a_spec_is_plain_data_that_travels(tmp_path: Path) -> None:
    spec = load("llama")
    assert spec.config.hidden_size == 32
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert model_layout(copy) == model_layout(spec)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "attention_dropout", 0.1),
        ("llama", "pretraining_tp", 2),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", "rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4]}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "sliding_window", 16),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "hidden_act", "nonsense"),
        ("llama", "auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", ["full_attention"] * 3),
        ("qwen2", "num_experts", 8),
        ("qwen2", "use_mrope", True),
        ("qwen3", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
    ],
)
def test_fields_that_would_change_the_maths_unseen_are_refused_by_name(
    model_type: str, field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        load(model_type, **{field: value})


def test_all_refused_fields_are_named_at_once() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load("llama", attention_dropout=0.1, num_experts=8)
    assert "attention_dropout" in str(caught.value)
    assert "num_experts" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 33}, "hidden size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_impossible_sizes_and_missing_keys_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        load("llama", **changes)


def test_an_unknown_family_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="llama, mistral, qwen2, qwen3"):
        load("gpt2")


@pytest.mark.parametrize("content", [None, "", "not json", "[1, 2]"])
def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        load_model_spec(tmp_path, Precision.BF16)


def test_decay_touches_matrices_and_embeddings_but_no_norm_or_bias() -> None:
    tensors = [t for layer in model_layout(load("qwen3", attention_bias=True)).layers for t in layer.tensors]
    kept = {t.name.removeprefix("model.layers.0.") for t in tensors if not t.decay and ".layers.0." in t.name}
    assert kept == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.bias",
    }
    by_name = {t.name: t for t in tensors}
    assert by_name["model.embed_tokens.weight"].decay
    assert by_name["lm_head.weight"].decay
    assert not by_name["model.norm.weight"].decay


def test_tensors_start_as_in_transformers() -> None:
    layout = model_layout(load("qwen2", initializer_range=0.05))
    by_name = {t.name: (t.init, t.std) for layer in layout.layers for t in layer.tensors}
    assert by_name["model.layers.2.self_attn.q_proj.weight"] == (InitKind.NORMAL, 0.05)
    assert by_name["model.layers.2.self_attn.q_proj.bias"] == (InitKind.ZEROS, 0.0)
    assert by_name["model.layers.2.input_layernorm.weight"] == (InitKind.ONES, 0.0)
    assert by_name["model.embed_tokens.weight"] == (InitKind.NORMAL, 0.05)
    assert by_name["model.norm.weight"] == (InitKind.ONES, 0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_stand_in_forward_order_and_a_tied_head_holds_the_norm_alone(tied: bool) -> None:
    layout = model_layout(load("llama", tie_word_embeddings=tied))
    assert [layer.index for layer in layout.layers] == [0, 1, 2, 3, 4]
    assert [layer.kind for layer in layout.layers] == [LayerKind.EMBEDDING, *[LayerKind.DECODER] * 3, LayerKind.HEAD]
    assert [layer.name for layer in layout.layers] == ["embedding", "layer-0000", "layer-0001", "layer-0002", "head"]
    assert len(layout.layers[-1].tensors) == (1 if tied else 2)
    assert layout.tied == tied
    decoders = [[(t.offset, t.shape) for t in layer.tensors] for layer in layout.layers[1:-1]]
    assert decoders[0] == decoders[1] == decoders[2], "one template serves all layers of a signature"
    assert all(t.offset % TENSOR_ALIGNMENT == 0 for layer in layout.layers for t in layer.tensors)


def test_layers_with_and_without_window_need_templates_of_their_own() -> None:
    family = family_of(load("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2))
    assert [family.window(index) for index in (1, 2, 3)] == [None, None, 8]
    assert family.signature(1) == family.signature(2) != family.signature(3)


def test_flops_count_the_lm_head_but_not_the_look_up() -> None:
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    attention = 6 * 3 * 64 * 32
    for tied in (True, False):
        spec = load("qwen2", tie_word_embeddings=tied)
        assert matmul_parameters(model_layout(spec)) == 3 * layer + 101 * 32
        assert model_flops_per_token(spec, 64) == 6 * (3 * layer + 101 * 32) + attention
    windowed = load("mistral", sliding_window=16)
    full = load("mistral", sliding_window=None)
    saved = model_flops_per_token(full, 64) - model_flops_per_token(windowed, 64)
    assert saved == 12 * 3 * 32 * (32 - 16 * (1 - 16 / 128))


def test_flops_of_wide_heads_count_the_heads_not_the_hidden_size() -> None:
    narrow, wide = load("qwen3", head_dim=8), load("qwen3", head_dim=16)
    attention = [model_flops_per_token(s, 64) - 6 * matmul_parameters(model_layout(s)) for s in (narrow, wide)]
    assert attention == [6 * 3 * 64 * 32, 6 * 3 * 64 * 64]


def test_embedding_gradient_sums_repeated_tokens_in_fp32_and_spares_the_padding_token() -> None:
    family = family_of(load("llama", pad_token_id=7))
    ids = torch.tensor([[3, 3, 7], [3, 0, 7]])
    grad = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.Embedding(101, 32, padding_idx=7)
    embedding(ids).backward(grad)
    accumulated = torch.ones(101, 32)
    family.embed_backward(ids, grad, accumulated)
    assert embedding.weight.grad is not None
    torch.testing.assert_close(accumulated - 1, embedding.weight.grad, atol=1e-6, rtol=0)
    many = torch.zeros(101, 32)
    family.embed_backward(torch.full((1, 4096), 3), torch.full((1, 4096, 32), 1e-3, dtype=torch.bfloat16), many)
    assert many[3, 0].item() == pytest.approx(4096 * torch.tensor(1e-3, dtype=torch.bfloat16).item(), rel=1e-4)
