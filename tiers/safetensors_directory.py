"""Which safetensors files of a Hugging Face directory make up the model; everything else is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

from tiers.durable_files import naming
from tiers.errors import ImportedTensorError, ShardError
from tiers.parsing import parse_json
from tiers.safetensors_header import StoredTensor, read_header

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

logger = logging.getLogger(__name__)


def read_directory(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the model in `directory`, by name.

    Reads `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
        ShardError: No such files, a pickle instead, a missing or damaged shard, or an index that disagrees with them.
        ImportedTensorError: Two shards hold a tensor of the same name.
    """
    if not directory.is_dir():
        raise ShardError(f"cannot read a model from {directory}: not a directory")
    index_path = directory / INDEX_NAME
    if (directory / SINGLE_NAME).exists():
        if index_path.exists():
            # As transformers does.
            logger.warning("%s holds %s and %s; the index is not read", directory, SINGLE_NAME, INDEX_NAME)
        return {tensor.name: tensor for tensor in read_header(directory / SINGLE_NAME)}
    if not index_path.exists():
        raise ShardError(_describe_absence(directory))
    weight_map = _read_index(index_path)
    file_names = sorted(set(weight_map.values()))
    missing = [name for name in file_names if not (directory / name).is_file()]
    if missing:
        raise ShardError(
            f"{index_path} lists {len(file_names)} files, {len(missing)} are missing: {listed(missing)}; download them"
        )
    tensors: dict[str, StoredTensor] = {}
    for file_name in file_names:
        for tensor in read_header(directory / file_name):
            if tensor.name in tensors:
                other = tensors[tensor.name].path.name
                raise ImportedTensorError(f"tensor {tensor.name} of {directory} is in two files: {other}, {file_name}")
            tensors[tensor.name] = tensor
    astray = [
        f"{name} in {file_name}"
        for name, file_name in weight_map.items()
        if name not in tensors or tensors[name].path != directory / file_name
    ]
    if astray:
        raise ShardError(f"{index_path} names tensors that are not where it says: {listed(astray)}")
    _warn_of_unlisted_shards(directory, file_names)
    return tensors


def listed(names: list[str], limit: int = 8) -> str:
    """Join names for a message of one line, leaving out what passes `limit`."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    try:
        with naming(path):
            text = path.read_text(encoding="utf-8")
        weight_map = parse_json(text)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"cannot read {path} ({path.stat().st_size} bytes): no JSON with a weight_map") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ShardError(f"the weight_map of {path} must map tensor names to file names")
    for file_name in weight_map.values():
        pure = PurePosixPath(file_name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in file_name or not pure.parts:
            raise ShardError(f"{path} names the file {file_name!r}, which lies outside its directory; refused")
        if pure.suffix != ".safetensors":
            raise ShardError(f"{path} names the file {file_name!r}; only .safetensors files are read")
    return weight_map


def _warn_of_unlisted_shards(directory: Path, file_names: list[str]) -> None:
    unlisted = sorted({path.name for path in directory.glob("model-*.safetensors")} - set(file_names))
    if unlisted:
        logger.warning("%s does not list these files of its directory: %s", directory / INDEX_NAME, listed(unlisted))


def _describe_absence(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    attempt = f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}"
    shards = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if shards:
        return f"{attempt}, only {listed(shards)}: is the index missing?"
    if pickles:
        return (
            f"{attempt}, only {listed(pickles)}, which could run code when read and are never opened; convert them "
            "with transformers' save_pretrained, which writes safetensors"
        )
    return f"{attempt}; found {listed(names) or 'no files'}"
