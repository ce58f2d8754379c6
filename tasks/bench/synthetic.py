"""Batches of random tokens: what a step costs does not depend on what they say."""

from __future__ import annotations

import numpy as np

from pipeline.messages import IGNORED, Batch
from pipeline.recipe import Recipe


def random_batch(recipe: Recipe, vocab_size: int, seed: int) -> Batch:
    """A full step of single-document sequences of the recipe's shape; every token but the last predicts the next."""
    train = recipe.train
    shape = (train.micro_batches, train.sequences_at_once, train.sequence_length)
    input_ids = np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)
    targets = np.full(shape, IGNORED, dtype=np.int32)
    targets[..., :-1] = input_ids[..., 1:]
    positions = np.broadcast_to(np.arange(train.sequence_length, dtype=np.int32), shape).copy()
    supervised = train.sequences_per_step * (train.sequence_length - 1)
    return Batch(input_ids, targets, positions, input_ids.size, supervised, single_document=True)
