"""A run's settings: `sections` has every key with its reason, `recipe` reads them from TOML and writes them back."""

from __future__ import annotations

from pipeline.recipe.errors import RecipeError
from pipeline.recipe.recipe import Difference, differences, load_recipe, parse_recipe, recipe_toml
from pipeline.recipe.resolved import Recipe
from pipeline.recipe.sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunSection,
    TrainSection,
)

__all__ = [
    "CheckpointSection",
    "DataSection",
    "Difference",
    "EvalSection",
    "LogSection",
    "MemorySection",
    "ModelSection",
    "OptimizerSection",
    "PrecisionSection",
    "Recipe",
    "RecipeError",
    "RunSection",
    "TrainSection",
    "differences",
    "load_recipe",
    "parse_recipe",
    "recipe_toml",
]
