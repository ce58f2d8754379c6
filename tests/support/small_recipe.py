"""The model that runs of whole commands train: some milliseconds an operation, and every kind of layer."""

from __future__ import annotations

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
