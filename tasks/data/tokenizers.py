"""Turns text into token ids: raw bytes, or a Hugging Face tokenizer from a local directory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tasks.data.rows import Int64Array
from tasks.data.settings import BYTES_TOKENIZER, DataError, DataSettings

BYTES_EOS_ID = 256


class Tokenizer(Protocol):
    """Encodes texts without special tokens; `begin` and `end` are put around a whole document."""

    vocabulary_size: int
    """Ids are below it. The model's vocabulary may be larger, never smaller."""
    needs_utf8: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def encode(self, texts: Sequence[bytes]) -> list[Int64Array]:
        """Encode each text alone."""
        ...


class BytesTokenizer:
    """Every byte is a token, whatever the encoding; 256 ends a document."""

    needs_utf8 = False
    begin: tuple[int, ...] = ()

    def __init__(self, *, append_eos: bool) -> None:
        self.vocabulary_size = BYTES_EOS_ID + append_eos
        self.end: tuple[int, ...] = (BYTES_EOS_ID,) if append_eos else ()

    def encode(self, texts: Sequence[bytes]) -> list[Int64Array]:
        """Encode each text alone."""
        return [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in texts]


class DirectoryTokenizer:
    """A tokenizer that transformers loads from a directory: no network, no code from the directory."""

    needs_utf8 = True

    def __init__(self, directory: Path, *, append_eos: bool) -> None:
        self._tokenizer = _load(directory)
        self.vocabulary_size = len(self._tokenizer)
        self.begin = self._begin()
        self.end: tuple[int, ...] = ()
        if append_eos:
            eos_id = self._tokenizer.eos_token_id
            if eos_id is None:
                raise DataError(
                    f"the tokenizer in {directory} has no end-of-document token; set data.append_eos = false"
                )
            self.end = (int(eos_id),)

    def encode(self, texts: Sequence[bytes]) -> list[Int64Array]:
        """Encode each text (UTF-8) alone."""
        lists = self._ids([text.decode() for text in texts], special=False)
        # One conversion for the batch: a call for each text costs more than the ids.
        flat = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=sum(map(len, lists)))
        return np.split(flat, np.cumsum([len(ids) for ids in lists])[:-1])

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        encoded = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _begin(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text (Llama: the begin-of-document token), found by trying."""
        plain = self._ids(["a"], special=False)[0]
        full = self._ids(["a"], special=True)[0]
        for at in range(len(full) - len(plain) + 1):
            if full[at : at + len(plain)] == plain:
                return tuple(full[:at])
        return ()


def open_tokenizer(settings: DataSettings) -> Tokenizer:
    """Load the tokenizer that the settings name.

    Raises:
        DataError: it is not there or cannot be loaded.
    """
    if settings.tokenizer == BYTES_TOKENIZER:
        return BytesTokenizer(append_eos=settings.append_eos)
    return DirectoryTokenizer(Path(settings.tokenizer), append_eos=settings.append_eos)


def _load(directory: Path) -> Any:
    if not directory.is_dir():
        raise DataError(f'data.tokenizer {directory} is no directory; give one with a tokenizer.json, or "bytes"')
    from transformers import AutoTokenizer  # 2 s to import, and not needed for bytes and token ids

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a damaged directory
        raise DataError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
