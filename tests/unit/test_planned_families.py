"""Families that are planned and not trained: their shapes are those that were published, and training refuses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import UnsupportedModelError
from pipeline.families import load_model_spec, model_layout
from pipeline.families.planned import PLANNED, planned_model
from pipeline.families.registry import FAMILIES, PLANNED_ONLY
from pipeline.recipe import load_recipe
from pipeline.recipe_placement import shape_of
from tasks.plan import main
from tasks.train import main as train
from tiers.layout import LayerKind, Precision

RECIPES = Path(__file__).parent.parent.parent / "tasks" / "recipes" / "plan"
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("recipe", "total", "active"), [("gpt-oss-120b", 116.83e9, 5.13e9), ("gpt-oss-20b", 20.91e9, 3.61e9)]
)
def test_gpt_oss_has_the_published_parameters_total_and_active(recipe: str, total: float, active: float) -> None:
    """The model card, arXiv 2508.10925, table 1. It counts the LM head and not the embedding as active."""
    layout, compute = shape_of(load_recipe(RECIPES / f"{recipe}.toml", []))
    assert layout.num_parameters == pytest.approx(total, rel=1e-3)
    counted = sum(compute.active_parameters(layer) for layer in layout.layers if layer.kind is not LayerKind.EMBEDDING)
    assert counted == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(("config", "total"), [(MIXTRAL, 46.70e9), (QWEN3_30B, 30.53e9)])
def test_other_mixtures_have_the_published_parameters(config: dict[str, object], total: float) -> None:
    assert planned_model(config, Precision.BF16).layout.num_parameters == pytest.approx(total, rel=1e-3)


def test_half_of_the_layers_of_gpt_oss_see_a_window() -> None:
    recipe = load_recipe(RECIPES / "gpt-oss-20b.toml", ["train.sequence_length=1024", "train.sequences_per_step=64"])
    assert shape_of(recipe)[1].attention_window == (1024 + 128) // 2


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen2.5-72b", "llama3-8b", "llama3-70b"])
def test_families_that_are_trained_keep_their_own_layout(model: str) -> None:
    recipe = load_recipe(RECIPES / f"{model}.toml", [])
    assert recipe.model.config is not None and not isinstance(recipe.model.config, Path)
    spec = load_model_spec({**recipe.model.config}, Precision.BF16)
    assert shape_of(recipe)[0] == model_layout(spec)


def test_training_refuses_what_can_only_be_planned_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(PLANNED_ONLY) == set(PLANNED) and not set(PLANNED) & set(FAMILIES)
    with pytest.raises(UnsupportedModelError, match=r"can be planned with tasks\.plan, not trained yet"):
        load_model_spec({"model_type": "gpt_oss"}, Precision.BF16)
    assert train([str(RECIPES / "gpt-oss-120b.toml"), "--set", "train.device=cpu"]) == 2
    assert "mixture of experts" in capsys.readouterr().err


def test_a_hugging_face_directory_with_nothing_but_a_config_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    for setting in ("source", "config"):
        path = tmp_path if setting == "source" else tmp_path / "config.json"
        recipe = tmp_path / f"{setting}.toml"
        steps = "[train]\nsteps = 1\nsequence_length = 1024\nsequences_per_step = 64\n"
        recipe.write_text(f'[model]\n{setting} = "{path}"\n[data]\npath = "data"\n{steps}')
        assert main([str(recipe), "--hardware", "h200-1.5tb"]) == 0
        text = capsys.readouterr().out
        assert "30.5B parameters" in text and "note: a mixture of experts can be planned" in text


def test_a_malformed_configuration_is_refused_with_what_transformers_says() -> None:
    with pytest.raises(UnsupportedModelError, match="transformers refuses the gpt_oss configuration"):
        planned_model({"model_type": "gpt_oss", "hidden_size": "wide"}, Precision.BF16)
