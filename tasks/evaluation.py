"""Which batches an evaluation measures: the same every time, as many sequences as the recipe asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from pipeline.messages import Batch
from pipeline.recipe import Recipe
from tasks.data.dataset import PackedDataset
from tasks.data.loader import eval_batches


def evaluation(recipe: Recipe, held_out: PackedDataset | None, waves: int) -> Callable[[], Iterator[Batch]] | None:
    """What makes the batches of an evaluation anew; None where nothing is held out.

    Args:
        recipe: Its `eval.sequences` are the first of the held-out ones, or all where there are no more.
        held_out: To measure on.
        waves: Of a step; no batch is larger than one.
    """
    if held_out is None:
        return None
    micro_batches = recipe.train.micro_batches
    parts = next(parts for parts in range(waves, micro_batches + 1) if micro_batches % parts == 0)
    return partial(
        eval_batches, _first(held_out, recipe.eval.sequences), recipe.train.sequences_at_once, micro_batches // parts
    )


def _first(dataset: PackedDataset, sequences: int | None) -> PackedDataset:
    if sequences is None or sequences >= dataset.num_sequences:
        return dataset
    return dataclasses.replace(
        dataset, plan=dataclasses.replace(dataset.plan, first=dataset.plan.first[: sequences + 1])
    )
