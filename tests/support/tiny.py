"""Models of a few thousand parameters, one a family, and random batches with and without packed documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.messages import IGNORED, Batch

VOCABULARY = 97
SEQUENCE = 24

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
}


def tiny_config(family: str, *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    """A Hugging Face config of `family` with five decoder layers."""
    return {**SHAPE, **FAMILIES[family], "tie_word_embeddings": tied, **changes}


def random_batch(
    seed: int, *, micro_batches: int = 2, micro_batch: int = 2, sequence: int = SEQUENCE, packed: bool = False
) -> Batch:
    """Random token ids; packed sequences hold several documents of random length and some unsupervised tokens."""
    rng = np.random.default_rng(seed)
    shape = (micro_batches, micro_batch, sequence)
    input_ids = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
    position_ids = np.broadcast_to(np.arange(sequence, dtype=np.int32), shape).copy()
    targets = np.full(shape, IGNORED, dtype=np.int32)
    targets[..., :-1] = input_ids[..., 1:]
    if packed:
        for row_positions, row_targets in zip(
            position_ids.reshape(-1, sequence), targets.reshape(-1, sequence), strict=True
        ):
            starts = np.sort(rng.choice(np.arange(1, sequence), size=3, replace=False))
            for start in starts:
                row_positions[start:] = np.arange(sequence - start)
                row_targets[start - 1] = IGNORED
            row_targets[rng.random(sequence) < 0.2] = IGNORED
    return Batch(
        input_ids=input_ids,
        targets=targets,
        position_ids=position_ids,
        tokens=input_ids.size,
        supervised_tokens=int((targets != IGNORED).sum()),
        single_document=not packed,
    )
