"""What a safetensors file says it holds, checked against what is on disk before a byte of a tensor is read.

Source: the format of https://github.com/huggingface/safetensors (8 bytes little-endian header length, JSON, data).
Nothing here unpickles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tiers.durable_files import naming
from tiers.errors import ShardError
from tiers.parsing import parse_json

LENGTH_BYTES = 8

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a length beyond it is not a length."""

GIT_LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    path: Path
    dtype: str
    """As the format spells it: BF16, F16, F32, ..."""
    shape: tuple[int, ...]
    offset_bytes: int
    """First byte in the file."""
    num_bytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ShardError: The file is empty, truncated, has trailing bytes, or is something else (a Git-LFS pointer, an HTML
            page). One line, with the file, the expected and the actual size.
    """
    actual = path.stat().st_size
    with naming(path), path.open("rb") as file:
        start = file.read(512)
        _refuse_what_is_not_safetensors(path, start, actual)
        data_start = LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little")
        if data_start > min(actual, LENGTH_BYTES + MAX_HEADER_BYTES):
            raise ShardError(
                f"{path} is truncated or no safetensors file: expected a header of {data_start} bytes, "
                f"found {actual} in all; download it again"
            )
        file.seek(LENGTH_BYTES)
        text = file.read(data_start - LENGTH_BYTES)
    try:
        tensors = [
            _stored(path, name, entry, data_start) for name, entry in parse_json(text).items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(
            f"{path} ({actual} bytes) has no readable safetensors header: {_one_line(error)}; download it again"
        ) from error
    expected = max((tensor.offset_bytes + tensor.num_bytes for tensor in tensors), default=data_start)
    if actual != expected:
        fault = "is truncated" if actual < expected else "has trailing bytes"
        raise ShardError(f"{path} {fault}: expected {expected} bytes, found {actual}; download it again")
    try:
        # The format's own library knows its finer rules: no holes, no overlap, sizes that agree with shapes.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ShardError(f"{path} ({actual} bytes) is no valid safetensors file: {_one_line(error)}") from error
    return tensors


def _refuse_what_is_not_safetensors(path: Path, start: bytes, actual: int) -> None:
    if actual < LENGTH_BYTES:
        raise ShardError(f"{path} is empty or truncated: expected at least {LENGTH_BYTES} bytes, found {actual}")
    if start.startswith(GIT_LFS_MARK):
        size = re.search(rb"^size (\d+)$", start, re.MULTILINE)
        expected = f"{int(size[1])} bytes" if size else "the model's weights"
        raise ShardError(
            f"{path} is a Git-LFS pointer, not the weights: expected {expected}, found {actual}; run `git lfs pull`"
        )
    if start.lstrip()[:1] == b"<":
        raise ShardError(
            f"{path} is an HTML or XML page, not safetensors: expected a binary header, found {actual} bytes of text "
            "(an error page of a download?); download it again"
        )


def _stored(path: Path, name: str, entry: dict[str, object], data_start: int) -> StoredTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"tensor {name} has no shape or no pair of offsets")
    if not all(isinstance(number, int) for number in (*shape, *offsets)):
        raise ValueError(f"tensor {name} has a size or an offset that is no whole number")
    begin, end = offsets
    return StoredTensor(name, path, str(entry["dtype"]), tuple(shape), data_start + begin, end - begin)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
