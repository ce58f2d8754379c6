"""Files of a Hugging Face model directory beside its tensors: which tokenizer and generation settings an export has."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.recipe import Recipe
from tasks.data.tokenizers import BYTES_EOS_ID
from tiers.manifest import Facts

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
GENERATION_FILES = ("generation_config.json",)


def copy_companions(recipe: Recipe, facts: Facts, directory: Path) -> str:
    """Copy into an export the tokenizer that its model was trained with, and generation settings that go with it.

    The tokenizer is that of the recipe; where the recipe names none, the source's: rows of token ids came from it. A
    model that read text as bytes has neither, for the source's would encode to ids that mean something else.

    Returns:
        What became of the tokenizer, in words.
    """
    if facts.bytes_tokenised:
        return f"none: the model reads bytes, ids 0 to 255{_end_of_bytes(recipe)}"
    origin = _tokenizer_directory(recipe)
    tokenizer = _files_of(origin, TOKENIZER_FILES)
    for path in (*tokenizer, *_files_of(recipe.model.source, GENERATION_FILES)):
        shutil.copyfile(path, directory / path.name)
    if tokenizer:
        return f"that of {origin}"
    return "none: the recipe names none" if origin is None else f"none: {origin} has none"


def missing_tokenizer(recipe: Recipe, facts: Facts) -> Path | None:
    """The directory of the tokenizer that the recipe names, where that is gone and was needed."""
    directory = recipe.data.tokenizer
    needed = isinstance(directory, Path) and not facts.bytes_tokenised
    return directory if needed and isinstance(directory, Path) and not directory.is_dir() else None


def companion_bytes(recipe: Recipe, facts: Facts) -> int:
    """What `copy_companions` copies."""
    if facts.bytes_tokenised:
        return 0
    copied = (
        *_files_of(_tokenizer_directory(recipe), TOKENIZER_FILES),
        *_files_of(recipe.model.source, GENERATION_FILES),
    )
    return sum(path.stat().st_size for path in copied)


def companion_config(recipe: Recipe, facts: Facts) -> dict[str, object]:
    """What the export's config.json says of special tokens otherwise than the source's."""
    if not facts.bytes_tokenised:
        return {}
    end = BYTES_EOS_ID if recipe.data.append_eos else None
    return {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}


def companion_files(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of a model directory beside its tensors, by patterns of their names."""
    found = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    return sorted(found)


def _tokenizer_directory(recipe: Recipe) -> Path | None:
    return recipe.data.tokenizer if isinstance(recipe.data.tokenizer, Path) else recipe.model.source


def _files_of(directory: Path | None, patterns: Sequence[str]) -> list[Path]:
    return companion_files(directory, patterns) if directory is not None else []


def _end_of_bytes(recipe: Recipe) -> str:
    return f"; {BYTES_EOS_ID} ends a document" if recipe.data.append_eos else ""
