"""The `zarr.json` files of a store, made by zarr-python itself in memory, and the check that a store has what we read.

zarr-python is never on the path of the bytes: only here, a few milliseconds a layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec
from zarr.core.buffer import Buffer as ZarrBuffer
from zarr.core.common import JSON
from zarr.storage import MemoryStore

from tiers.errors import ShardError
from tiers.layout import Buffer, LayerLayout, ModelLayout, Precision, buffer_types
from tiers.parsing import parse_json
from tiers.shards import ShardGeometry, ShardLabel, TensorSpan

FORMAT_VERSION = 1
"""Of stores and manifests. A change that older code would misread raises it."""
PROJECT_VERSION = "0.1.0"
"""Equal to pyproject.toml's, held by a test: a checkout is not installed, so no package metadata tells it."""
_COMPARED = ("shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value", "attributes")
"""What decides where the bytes are and what they mean; the rest may differ between zarr versions."""


class Compression(StrEnum):
    """How the chunks of a store are kept."""

    NONE = "none"
    ZSTD = "zstd"
    """zstd after a byte shuffle, zarr's `blosc` codec."""


ZSTD_LEVEL = 3
"""zstd's own default: higher ones take several times as long on floating-point noise and save a few percent."""


class MetadataFile(NamedTuple):
    """One `zarr.json`: its path in the store and its content."""

    path: str
    content: bytes


def root_metadata(model: ModelLayout) -> MetadataFile:
    """The root group: format and project version, precision, layer names in forward order."""
    files: dict[str, ZarrBuffer] = {}
    attributes: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "project_version": PROJECT_VERSION,
        "precision": str(model.precision),
        "tied": model.tied,
        "num_parameters": model.num_parameters,
        "layers": tuple(layer.name for layer in model.layers),
    }
    zarr.open_group(MemoryStore(files), mode="w", zarr_format=3, attributes=attributes)
    return MetadataFile("zarr.json", files["zarr.json"].to_bytes())


def layer_metadata(
    layer: LayerLayout, precision: Precision, buffers: Iterable[Buffer], compression: Compression = Compression.NONE
) -> tuple[MetadataFile, ...]:
    """The group of a layer and an array for each of `buffers`."""
    files: dict[str, ZarrBuffer] = {}
    root = zarr.open_group(MemoryStore(files), mode="w", zarr_format=3)
    group = root.create_group(layer.name, attributes={"kind": str(layer.kind), "index": layer.index})
    tensors: list[JSON] = [{"name": t.name, "offset": t.offset, "shape": list(t.shape)} for t in layer.tensors]
    for buffer in buffers:
        geometry = ShardGeometry.of(layer.numel, buffer_types(precision)[buffer])
        group.create_array(
            str(buffer),
            shape=(geometry.numel,),
            chunks=(geometry.chunk_numel,),
            shards=(geometry.chunk_numel * geometry.num_chunks,),
            dtype=geometry.element.storage,
            serializer=BytesCodec(endian="little"),
            filters=None,
            compressors=_compressor(geometry.element.bytes) if compression is Compression.ZSTD else None,
            fill_value=0,
            attributes={"element_type": str(geometry.element), "tensors": tensors},
        )
    return tuple(MetadataFile(path, data.to_bytes()) for path, data in files.items() if path != "zarr.json")


def _compressor(itemsize: int) -> BloscCodec:
    return BloscCodec(cname="zstd", clevel=ZSTD_LEVEL, shuffle="shuffle", typesize=itemsize)


def check_layer_metadata(
    directory: Path,
    layer: LayerLayout,
    precision: Precision,
    buffers: Iterable[Buffer],
    compression: Compression = Compression.NONE,
) -> None:
    """Refuse a store whose arrays are not laid out as `layer` is.

    Raises:
        ShardError: A `zarr.json` is missing or unreadable, or says another shape, type, codec or tensor table.
    """
    for path, content in layer_metadata(layer, precision, buffers, compression):
        found, wanted = _read_json(directory / path), json.loads(content)
        for key in _COMPARED:
            if found.get(key) != wanted.get(key):
                raise ShardError(
                    f"{directory / path} is of another model or precision: {key} is {_short(found.get(key))}, "
                    f"this model needs {_short(wanted.get(key))}"
                )


def read_shard_label(shard: Path, chunk_bytes: int) -> ShardLabel:
    """Name the chunks of a shard from its array's attributes, without a layout of the model.

    Raises:
        ShardError: The array's `zarr.json` cannot be read or has no tensor table.
    """
    path = shard.parents[1] / "zarr.json"
    metadata: Any = _read_json(path)
    try:
        itemsize = np.dtype(metadata["data_type"]).itemsize
        spans = [TensorSpan(t["name"], t["offset"], math.prod(t["shape"])) for t in metadata["attributes"]["tensors"]]
    except (KeyError, TypeError) as error:
        raise ShardError(f"{path} has no tensor table: {error!r}") from error
    return ShardLabel(str(shard), tuple(spans), chunk_bytes // itemsize)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ShardError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ShardError(f"cannot read {path}: not a JSON object")
    return content


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
