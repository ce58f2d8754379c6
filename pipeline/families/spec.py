"""What a model is: its Hugging Face configuration, vetted, and the precision that it is trained in.

A `ModelSpec` is text, so it travels between processes; every process builds the same objects from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import UnsupportedModelError
from pipeline.families.attention import ATTENTION_NAME
from pipeline.families.refusals import refusals
from pipeline.families.registry import FAMILIES, PLANNED_ONLY
from tiers.layout import Precision
from tiers.parsing import parse_json

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be trained. Made by `load_model_spec`."""

    config_json: str
    """The configuration as its source has it, keys sorted: what an export writes back."""
    precision: Precision

    @property
    def config(self) -> Any:
        """The `PreTrainedConfig` of the model, with our attention function chosen. Shared: do not change it."""
        return _config_of(self.config_json)

    @property
    def model_type(self) -> str:
        """Hugging Face name of the family."""
        return str(self.config.model_type)

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        return int(self.config.vocab_size)

    @property
    def num_decoder_layers(self) -> int:
        """Decoder layers, embedding and head left out."""
        return int(self.config.num_hidden_layers)

    @property
    def head_dim(self) -> int:
        """Elements of one attention head; not always hidden size / heads."""
        head_dim = getattr(self.config, "head_dim", None)
        return int(head_dim or self.hidden_size // int(self.config.num_attention_heads))

    @property
    def num_attention_heads(self) -> int:
        """Query heads of an attention layer."""
        return int(self.config.num_attention_heads)

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding matrix."""
        return bool(self.config.tie_word_embeddings)


def load_model_spec(source: Path | Mapping[str, object], precision: Precision) -> ModelSpec:
    """Read and vet a model's configuration.

    Args:
        source: Directory with a `config.json`, or the configuration itself with a `model_type`.
        precision: How the model is to be trained.

    Raises:
        UnsupportedModelError: The file is missing or malformed, the family is unknown, or a field asks for maths that
            is not computed here; all such fields are named at once.
    """
    origin, config = (
        (str(source / CONFIG_FILE), read_config(source)) if isinstance(source, Path) else ("[model]", source)
    )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = f" ({PLANNED_ONLY[model_type]})" if isinstance(model_type, str) and model_type in PLANNED_ONLY else ""
        raise UnsupportedModelError(
            f"{origin}: model_type = {model_type!r} cannot be trained{why}; supported: {', '.join(sorted(FAMILIES))}"
        )
    if reasons := list(refusals(model_type, config)):
        raise UnsupportedModelError(
            f"{origin}: the {model_type} model cannot be trained as described, because these fields would change its "
            f"maths or are unknown: {'; '.join(reasons)}. Remove what has no effect, or choose another model."
        )
    spec = ModelSpec(json.dumps(config, sort_keys=True), precision)
    try:
        _check_sizes(spec)
        # Building a layer and the rotary tables finds what only the classes know: missing keys, odd head sizes.
        entry = FAMILIES[model_type]
        entry.rotary(spec.config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{origin}: {error}") from None
    except Exception as error:  # transformers raises what it likes for a malformed configuration
        raise UnsupportedModelError(f"{origin}: transformers refuses the configuration: {error}") from error
    return spec


def read_config(directory: Path) -> dict[str, object]:
    """The fields of a directory's `config.json`, not vetted.

    Raises:
        UnsupportedModelError: It is missing or no table of JSON.
    """
    path = directory / CONFIG_FILE
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if directory.is_dir():
            what = f"no {CONFIG_FILE}; a model is a directory as `save_pretrained` writes it"
        else:
            what = (
                "no such directory. Nothing is downloaded here: `hf download NAME --local-dir DIRECTORY` gets a model"
            )
        raise UnsupportedModelError(f"{directory}: {what}") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path}: holds a {type(config).__name__}, not a table of fields")
    return config


def _check_sizes(spec: ModelSpec) -> None:
    config = spec.config
    heads, key_value_heads = spec.num_attention_heads, int(config.num_key_value_heads)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, name) < 1:
            raise UnsupportedModelError(f"{name} = {getattr(config, name)} must be at least 1")
    if key_value_heads < 1 or heads % key_value_heads:
        raise UnsupportedModelError(
            f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {key_value_heads}"
        )
    if spec.head_dim % 2:
        raise UnsupportedModelError(f"head_dim = {spec.head_dim} must be even: rotary embedding turns pairs")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise UnsupportedModelError(f"sliding_window = {window} must be at least 1 token, or null")


@lru_cache(maxsize=16)
def _config_of(config_json: str) -> Any:
    fields = json.loads(config_json)
    config = FAMILIES[fields.pop("model_type")].config_class(**fields)
    config._attn_implementation = ATTENTION_NAME
    return config
