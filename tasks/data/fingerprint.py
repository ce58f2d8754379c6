"""Names a cache by what went into it, settings and files, and a data set by the documents that came out of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tasks.data.settings import BYTES_TOKENIZER, DataSettings
from tasks.data.sources import SourceFile
from tasks.data.token_cache import FORMAT_VERSION, TokenCache

HASHED_WHOLE_BYTES = 1 << 20
"""Up to this size a file's whole content counts; of larger ones the ends, the size and the time of change."""
TOKENIZER_WHOLE_BYTES = 64 << 20
"""The same of a tokenizer's files: large ones have 30 MiB, and what was copied anew is still the same."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
"""Endings of a model's files that hold its weights."""


def fingerprint(settings: DataSettings, files: tuple[SourceFile, ...], dtype: str) -> str:
    """Hash everything that the tokens depend on. Sequence length, seed and policies of packing are not part of it."""
    digest = hashlib.blake2b(digest_size=12)
    parts = [
        FORMAT_VERSION,
        dtype,
        settings.text_field,
        settings.tokenizer,
        settings.append_eos,
        settings.input_ids_column,
        settings.labels_column,
        settings.on_bad_row,
    ]
    digest.update(json.dumps(parts).encode())
    for file in files:
        digest.update(json.dumps([str(file.path), file.format]).encode())
        _add_file(digest, file.path)
    if settings.tokenizer != BYTES_TOKENIZER:
        for path in tokenizer_files(Path(settings.tokenizer)):
            digest.update(json.dumps(path.name).encode())
            _add_file(digest, path, whole_bytes=TOKENIZER_WHOLE_BYTES)
    return digest.hexdigest()


def tokenizer_files(directory: Path) -> list[Path]:
    """Files that a tokenizer may be made of, whatever their names: all of its directory but weights and hidden ones."""
    if not directory.is_dir():
        return []
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() not in WEIGHTS
    )


def _add_file(digest: hashlib.blake2b, path: Path, *, whole_bytes: int = HASHED_WHOLE_BYTES) -> None:
    status = path.stat()
    digest.update(json.dumps(status.st_size).encode())
    with path.open("rb") as stream:
        if status.st_size <= whole_bytes:
            digest.update(stream.read(status.st_size))
            return
        digest.update(json.dumps(status.st_mtime_ns).encode())
        digest.update(stream.read(HASHED_WHOLE_BYTES // 2))
        stream.seek(-HASHED_WHOLE_BYTES // 2, 2)
        digest.update(stream.read(HASHED_WHOLE_BYTES // 2))


def content(cache: TokenCache) -> str:
    """Hash the documents, in order, by their checksums: the same wherever the files lie and whenever they were written.

    Labels count too, by the checksum that the cache was written with.
    """
    return _content(cache, cache.header.labels_checksum if cache.header.num_labels else None)


def content_without_labels(cache: TokenCache) -> str:
    """Hash the documents as the first versions did, which counted supervised tokens and did not look at labels.

    Their checkpoints have such a fingerprint; of data without labels it is the same as `content`.
    """
    return _content(cache, None)


def _content(cache: TokenCache, labels_checksum: int | None) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for column in ("length", "supervised", "checksum"):
        digest.update(cache.documents[column].tobytes())
    if labels_checksum is not None:
        digest.update(labels_checksum.to_bytes(4, "little"))
    return digest.hexdigest()


def combine(*parts: object) -> str:
    """Hash values of plain types into one name."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
