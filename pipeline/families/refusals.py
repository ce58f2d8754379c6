"""Which fields of a configuration are understood, which are inert, and which values would change the maths unseen.

A field that no rule here knows is refused: training a model that is not quite the one described is worse than not
training it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers.activations import ACT2FN

from pipeline.families.registry import FAMILIES

INERT_FIELDS = frozenset(
    {
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "use_return_dict",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "name_or_path",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "tokenizer_class",
        "prefix",
        "task_specific_params",
        "is_llama_config",
        "unsloth_fixed",
        "unsloth_version",
        "sep_token_id",
        "decoder_start_token_id",
    }
)
"""Fields that say nothing about the maths of training. Names that start with `_` count as inert too."""

GENERATION_FIELDS = frozenset(
    {
        "begin_suppress_tokens",
        "bad_words_ids",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""What older files keep about sampling: nothing to do with training."""

ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
"""Where files of different ages keep the rotary parameters; their contents are checked apart."""

ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention_dropout": (None, 0),
    "attention_bias": (None, False),
    "chunk_size_feed_forward": (None, 0),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (None, False),
    "is_decoder": (None, False, True),
    "is_encoder_decoder": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None,),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
}
"""Fields accepted with these values alone, unless the family computes the field itself."""

FAMILY_FIELDS: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "qwen3": frozenset({"attention_bias"}),
}
"""Fields of ONLY_VALUES that a family's own layers compute, whatever the value."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary tables that do not depend on the running length, unlike `dynamic` and `longrope`."""

ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)

LAYER_TYPES = ("full_attention", "sliding_attention")


def refusals(model_type: str, config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for every field of `config`, as its file has it, that cannot be trained as it stands."""
    known = FAMILIES[model_type].known_fields() | INERT_FIELDS | GENERATION_FIELDS | ROPE_FIELDS
    own = FAMILY_FIELDS.get(model_type, frozenset())
    for name, value in config.items():
        if name in ONLY_VALUES and name not in own:
            if value not in ONLY_VALUES[name]:
                allowed = ", ".join(repr(entry) for entry in ONLY_VALUES[name] if entry is not None) or "absent"
                yield f"{name} = {value!r} (supported: {allowed})"
        elif name == "auto_map":
            yield "auto_map (the model brings its own code, which is never run)"
        elif name not in known and not name.startswith("_"):
            yield f"{name} = {value!r} (not a field of {model_type})"
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        yield f"hidden_act = {activation!r} (supported: those of transformers, e.g. 'silu', 'gelu')"
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            yield from _rope_refusals(name, rope)
        elif rope is not None:
            yield f"{name} = {rope!r} (must be a table)"
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and (unknown := sorted({str(t) for t in layer_types} - set(LAYER_TYPES))):
        yield f"layer_types holds {', '.join(unknown)} (supported: {', '.join(LAYER_TYPES)})"


def _rope_refusals(name: str, rope: Mapping[str, object]) -> Iterator[str]:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        yield f"{name}.rope_type = {rope_type!r} (supported: {', '.join(ROPE_TYPES)})"
    for key, value in rope.items():
        neutral = key == "partial_rotary_factor" and value in (None, 1)
        if key not in ROPE_KEYS and not neutral:
            yield f"{name}.{key} = {value!r} (supported keys: {', '.join(sorted(ROPE_KEYS))})"
