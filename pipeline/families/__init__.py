"""What each Hugging Face `model_type` needs to be trained layer by layer.

`spec` reads and vets a configuration, `registry` lists the families, `family` builds the parts of a model,
`layout` gives every tensor its place, `flops` counts the arithmetic.
"""

from __future__ import annotations

from pipeline.families.family import Family, Rotary, family_of
from pipeline.families.flops import matmul_parameters, model_flops_per_token
from pipeline.families.layout import model_layout
from pipeline.families.spec import ModelSpec, load_model_spec, read_config

__all__ = [
    "Family",
    "ModelSpec",
    "Rotary",
    "family_of",
    "load_model_spec",
    "matmul_parameters",
    "model_flops_per_token",
    "model_layout",
    "read_config",
]
