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
    if settings.tokenizer != BYTES_TOKENIZER and (directory := Path(settings.tokenizer)).is_dir():
        for path in sorted(directory.iterdir()):
            if path.is_file() and ("token" in path.name or path.name.startswith(("vocab", "merges"))):
                digest.update(path.name.encode())
                _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    status = path.stat()
    digest.update(json.dumps(status.st_size).encode())
    with path.open("rb") as stream:
        if status.st_size <= HASHED_WHOLE_BYTES:
            digest.update(stream.read())
            return
        digest.update(json.dumps(status.st_mtime_ns).encode())
        digest.update(stream.read(HASHED_WHOLE_BYTES // 2))
        stream.seek(-HASHED_WHOLE_BYTES // 2, 2)
        digest.update(stream.read())


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
