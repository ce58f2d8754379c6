"""What a recipe's `[model] source` is: a Hugging Face directory, or a store that `tasks.import_hf` made of one."""

from __future__ import annotations

from pathlib import Path

from tiers.errors import CheckpointError
from tiers.layout import ModelLayout
from tiers.manifest import read_manifest, verify
from tiers.safetensors_source import SafetensorsSource

STORE_CHECKPOINT = Path("checkpoints", "step-000000")
"""Where a store has its model."""


def imported_checkpoint(source: Path) -> Path | None:
    """The checkpoint of step 0 of an imported store; None for a Hugging Face directory."""
    path = source / STORE_CHECKPOINT
    return path if path.is_dir() else None


def check_source(source: Path, model: ModelLayout, run_dir: Path) -> None:
    """Refuse a source whose tensors are not the model's, before anything is allocated.

    Raises:
        ShardError, ImportedTensorError: A Hugging Face directory lacks or has other tensors than the model.
        CheckpointError: A store is incomplete or of another precision, or is the run's own directory.
    """
    checkpoint = imported_checkpoint(source)
    if checkpoint is None:
        SafetensorsSource(source, model)
        return
    if source == run_dir:
        raise CheckpointError(
            f"model.source and run.dir are both {source}: checkpoints of the run would replace the imported model; "
            "give the run a directory of its own"
        )
    if problems := verify(checkpoint, deep=False):
        raise CheckpointError(f"model.source = {source} is damaged: {problems[0]}; import the model again")
    facts = read_manifest(checkpoint).facts
    if facts.precision is not model.precision:
        raise CheckpointError(
            f"model.source = {source} was imported for precision.mode = {facts.precision}, the recipe has "
            f"{model.precision}; change the recipe, or import again with --precision {model.precision}"
        )
