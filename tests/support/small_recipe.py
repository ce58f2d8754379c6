"""The model that runs of whole commands train: some milliseconds an operation, and every kind of layer."""

from __future__ import annotations

from pathlib import Path

SMALL_MODEL = """
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 320
max_position_embeddings = 128
"""

ONE_STEP = f"""{SMALL_MODEL}[data]
path = "a.txt"
[train]
steps = 1
sequence_length = 128
sequences_per_step = 2
device = "cpu"
"""


def write_one_step(directory: Path, words: int) -> Path:
    """Write a recipe of one step, its run and its text of so many words to a directory; return the recipe's path."""
    (directory / "a.txt").write_text("words " * words)
    recipe = directory / "recipe.toml"
    recipe.write_text(ONE_STEP + f'[run]\ndir = "{directory / "run"}"\n')
    return recipe
